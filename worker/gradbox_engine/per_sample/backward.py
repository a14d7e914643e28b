"""One batched forward and one batched backward pass of a shard, turned into factors.

Shapes: B samples, Y outputs (1 for a per-sample gradient), P parameters.
Cost: one forward, one backward without weight gradients for each chunk of outputs, and the layer
inputs and output gradients in memory at once. A parameter that is looped over costs B · Y backward
passes of the whole batch. Known not to be optimal: gradients are all alive before the first term is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradbox_engine.errors import NoBatchAxis, SelfCheckFailed
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.per_sample.derived_parameters import parameter_terms
from gradbox_engine.per_sample.gradients import (
    asked_for,
    dense,
    gradients,
    gradients_in_turn,
    leaf_gradients,
)
from gradbox_engine.per_sample.planning.model import CallableModel
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.recording.function_calls import (
    Key,
    StepRecorder,
    custom_functions_shown,
)
from gradbox_engine.torch_private import hooks_on_gradient
from gradbox_factors import Block, Lookup, Outer, Positions, Term, Total, Zero

Terms = dict[str, Term]
Head = Callable[..., Tensor]
"""(z, first=0) → what is differentiated, for z of a shard's samples from `first` on."""


class RecordedGraph:
    """A shard's graph, from which factors are drawn.

    Args:
        model: the model.
        plan: how its uses are treated.
        head: maps z (B, ...) to what is differentiated, (B, Y).
        alone: returns z of a call on one sample, through which its rows are taken where they take
            a backward pass each; None where it cannot be called alone.
    """

    def __init__(
        self,
        model: CallableModel,
        plan: Plan,
        position: Position,
        head: Head,
        *,
        alone: Callable[[int], Tensor | None] | None = None,
    ) -> None:
        self._parameters, self._plan, self._alone = model.parameters, plan, alone
        self._on_several_devices = model.on_several_devices
        self._in_float16 = model.in_float16
        arguments = model.feed.take(position)
        model.restore_buffers()  # before the call: afterwards the graph may read what it wrote
        samples = plan.samples(arguments) or 0
        recorded = model.parameters if plan.recorded else {}
        self._recorder = StepRecorder(recorded, plan.steps, samples=samples)
        with custom_functions_shown():
            self.z = model.call(position, arguments, observed=self._recorder)
        self._recorder.finish()
        self.calls = hash(tuple(self._recorder.called))  # the functions called, in order
        self._recorder.called.clear()
        if not self.deviated and self.z.shape[0] != samples:
            raise NoBatchAxis(
                f"{model.where(position)}: the output: expected {samples} rows, one a sample, got "
                f"shape {tuple(self.z.shape)}: keep the samples on dim 0, also where there is one"
            )
        with torch.enable_grad():
            self.value = self.z if self.deviated else head(self.z)

    @property
    def deviated(self) -> bool:
        """Whether a call was not as planned, so that no rows can be drawn from this graph."""
        return self._recorder.deviated

    @property
    def samples(self) -> int:
        """B."""
        return self.value.shape[0]

    @property
    def outputs(self) -> int:
        """Y."""
        return self.value.shape[1]

    def free(self) -> None:
        """Free the graph; the numbers stay."""
        self.z, self.value = self.z.detach(), self.value.detach()
        self._recorder.edges.clear()
        self._recorder.derived.clear()

    def gradient_bytes(self) -> int:
        """Return what the output gradients of one output take."""
        return sum(record.gradient_bytes for record in self._recorder.edges)

    def terms(self, outputs: range, *, keep_graph: bool, slopes: Tensor | None = None) -> Terms:
        """Return every parameter's term for some outputs.

        Args:
            slopes: Σ_b ∂v_b/∂z of one output where it is known: the pass then begins at z.
        """
        records = self._recorder.edges
        looped = bool(self._plan.loops) and self.z.requires_grad
        by_edge: Sequence[Tensor | None] = []
        if records:
            edges = [record.edge for record in records]
            keep = looped or keep_graph
            if slopes is None or hooks_on_gradient(self.z):  # which the slopes went through
                by_edge = self._backward(edges, outputs, keep=keep)
            else:
                of_sum = gradients(
                    self.z, edges, slopes, keep_graph=keep, in_float16=self._in_float16
                )
                by_edge = [None if g is None else g.unsqueeze(0) for g in of_sum]
        found: dict[Key, list[Term]] = {}
        for record, gradient in zip(records, by_edge, strict=True):
            if gradient is None:
                continue
            if not record.input_unchanged():
                raise RuntimeError(
                    "a layer's input was changed in place after the layer used it, which autograd "
                    "refuses in training as well: make the change out of place"
                )
            for key, term in record.terms(gradient):
                found.setdefault(key, []).append(term)
        self._pull_back(found)
        if looped:
            for name, array in self.looped(outputs).items():
                found[name] = [Block(name, tuple(array.shape[2:]), array)]
        merged = {n: self._merged(n, found.get(n, []), len(outputs)) for n in self._parameters}
        if self._on_several_devices:
            merged = {name: term.on(self.value.device) for name, term in merged.items()}
        return merged

    def leaf_gradients(
        self,
        cotangents: Tensor,
        parameters: Mapping[str, Tensor],
        *,
        outputs: slice = slice(None),
        keep_graph: bool = True,
    ) -> dict[str, Tensor | None]:
        """Return autograd's gradient by parameter, for cotangents (B, Y) of some outputs."""
        root, cotangent = self._root(self.value[:, outputs], cotangents)
        return leaf_gradients(
            root,
            parameters,
            cotangent,
            leaves=self._parameters,
            keep_graph=keep_graph,
            in_float16=self._in_float16,
        )

    def pulled_back(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by parameter, u of shape (B, Y), by one ordinary backward."""
        parameters = self._parameters
        found = self.leaf_gradients(cotangents.to(self.value), parameters, keep_graph=False)
        return {
            name: torch.zeros_like(parameters[name]) if gradient is None else dense(gradient)
            for name, gradient in found.items()
        }

    def _root(
        self, value: Tensor, cotangent: Tensor, *, batched: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return where a backward pass begins, and with what: through float16 at z.

        Only there it is known how large the cotangent is that float16 has to hold.
        """
        if not self._in_float16 or hooks_on_gradient(self.z):
            return value, cotangent
        (at_z,) = gradients(value, [self.z], cotangent, keep_graph=True, batched=batched)
        return (value, cotangent) if at_z is None else (self.z, at_z)

    def _backward(
        self, edges: Sequence[GradientEdge], outputs: range, *, keep: bool
    ) -> Sequence[Tensor | None]:
        """Return the gradients at the edges, (Y, ...) each; None where no path leads to one."""
        value = self.value
        if not value.requires_grad:  # which tells nothing of the backward passes of other shards
            return [None] * len(edges)
        cotangents = _identity(self.outputs, outputs, self.samples, value.dtype, value.device)
        scaled = self._in_float16
        if len(outputs) == 1:
            root, cotangent = self._root(value, cotangents[0])
            single = gradients(root, edges, cotangent, keep_graph=keep, in_float16=scaled)
            return [None if g is None else g.unsqueeze(0) for g in single]
        root, cotangents = self._root(value, cotangents, batched=True)
        untried = self._plan.batched_backward is None
        if self._plan.batched_backward is not False:
            try:
                # The graph is for the passes below, if this fails midway.
                found = gradients(
                    root,
                    edges,
                    cotangents,
                    keep_graph=keep or untried,
                    in_float16=scaled,
                    batched=True,
                )
                self._plan.batched_backward = True
                return found
            except RuntimeError as error:  # an operation of the graph takes no batches
                if not untried or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._plan.batched_backward = False
        return gradients_in_turn(root, edges, cotangents, in_float16=scaled)

    def _pull_back(self, found: dict[Key, list[Term]]) -> None:
        """Turn terms of derived tensors into terms of the parameters they are made of."""
        terms: dict[Key, list[Term]] = {
            key: found.pop(key) for key in list(found) if not isinstance(key, str)
        }
        pulled = parameter_terms(
            self._recorder.derived, terms, self._parameters, in_float16=self._in_float16
        )
        for name, term in pulled:
            found.setdefault(name, []).append(term)

    def looped(self, outputs: range) -> dict[str, Tensor]:
        """Return rows by one backward pass for each sample and output, for the plan's loops.

        A pass begins at z, with the sample's own slope alone: through the loss of all, another
        sample's slope that is not finite would come in as 0 × NaN.
        """
        looped = {name: self._parameters[name] for name in self._plan.loops}
        sizes = self.samples, len(outputs)
        arrays = {name: self._empty(p).new_zeros(*sizes, *p.shape) for name, p in looped.items()}
        slopes = [self._slopes(output) for output in outputs]
        for sample in range(self.samples):
            root = None if self._alone is None else self._alone(sample)
            mine = slice(None) if root is not None else slice(sample, sample + 1)
            root = self.z if root is None else root
            leaves = asked_for(root, looped, self._parameters)
            for column, slope in enumerate(slopes):
                if slope is None:
                    continue
                cotangent = torch.zeros_like(root)
                cotangent[mine] = slope[sample]
                rows = leaf_gradients(
                    root,
                    leaves,
                    cotangent,
                    leaves=leaves,
                    keep_graph=True,
                    in_float16=self._in_float16,
                )
                for name, array in arrays.items():
                    gradient = rows[name]
                    if gradient is not None:
                        array[sample, column] = dense(gradient)
        return arrays

    def _slopes(self, output: int) -> Tensor | None:
        """Return Σ_b ∂v_b/∂z of an output."""
        values = self.value[:, output]
        (slopes,) = gradients(values, [self.z], torch.ones_like(values), keep_graph=True)
        return slopes

    def _empty(self, parameter: Tensor) -> Tensor:
        """Return a tensor of the dtype of a parameter's rows, wide where they pass float16."""
        dtype = parameter.dtype
        wide = accumulation_dtype(dtype) if self._in_float16 else dtype
        return parameter.new_empty(0, dtype=wide)

    def _merged(self, name: str, terms: list[Term], num_outputs: int) -> Term:
        if not terms:
            empty = self._empty(self._parameters[name]).new_empty(self.samples, num_outputs, 0)
            return Zero(name, tuple(self._parameters[name].shape), empty)
        for term in terms:
            if term.samples != self.samples:
                raise SelfCheckFailed(
                    f"parameter {name!r}: expected a term of {self.samples} samples, got "
                    f"{term.samples}: please report this model"
                )
        return terms[0] if len(terms) == 1 else _joined(terms)


def _joined(terms: list[Term]) -> Term:
    """Join terms of one kind along their positions; keep the sum of the others."""
    kinds: dict[Any, list[Term]] = {}
    for term in terms:
        kind = (
            type(term),
            getattr(term, "transposed", None),
            getattr(term, "channels_first", None),
        )
        kinds.setdefault(kind, []).append(term)
    joined: list[Term] = []
    for same in kinds.values():
        first = same[0]
        if len(same) == 1:
            joined.append(first)
        elif isinstance(first, Outer):
            left = torch.cat([term.left for term in same if isinstance(term, Outer)], 2)
            right = torch.cat([term.right for term in same if isinstance(term, Outer)], 1)
            joined.append(replace(first, left=left, right=right))
        elif isinstance(first, Lookup):
            left = torch.cat([term.left for term in same if isinstance(term, Lookup)], 2)
            ids = torch.cat([term.ids for term in same if isinstance(term, Lookup)], 1)
            joined.append(replace(first, left=left, ids=ids))
        elif isinstance(first, Positions | Block):
            block = sum((term.block() for term in same[1:]), start=first.block())
            joined.append(Block(first.parameter, first.shape, block))
        else:
            joined += same
    # What overwrites its output goes first; a lookup only adds rows.
    joined.sort(key=lambda term: isinstance(term, Lookup))
    return joined[0] if len(joined) == 1 else Total(tuple(joined))


def _identity(
    size: int, outputs: range, samples: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the cotangents of some outputs for every sample, (len(outputs), B, Y)."""
    eye = torch.eye(size, dtype=dtype, device=device)[outputs.start : outputs.stop]
    return eye[:, None].expand(len(outputs), samples, size)
