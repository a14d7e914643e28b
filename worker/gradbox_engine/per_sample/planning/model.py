"""A model made ready for the rows of one job.

Shards go through the same feed and the same calls as those of a set gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs, NoBatchAxis
from gradbox_engine.model.calling.outputs import BARE
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.kernels import checkpoints_inlined, compiled_code_run_eagerly
from gradbox_engine.model.precision import AUTOCAST, accumulation_dtype
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.tensor_equality import strided_parts
from gradbox_engine.model.wrt import INPUTS, select
from gradbox_engine.requests import CallKeywords, CallOptions, Group, Shard
from gradbox_engine.torch_private import hooks_on_gradient, is_traceable_wrapper_subclass

Shapes = tuple[tuple[str, Any, Any], ...]
"""What a plan depends on of a shard: the shape and dtype of each tensor, and all other values."""

CHECKS = frozenset({"coupling", "self"})
NOTHING = nullcontext()


@contextmanager
def callable_model(
    model: nn.Module,
    groups: Sequence[Group],
    *,
    wrt: Sequence[str] | None = None,
    unchecked: Sequence[str] = (),
    **options: Unpack[CallKeywords],
) -> Iterator[CallableModel]:
    """Set a model up, with requires_grad on the wanted parameters alone, and put it back.

    Args:
        unchecked: checks to leave out: "coupling" (no sample sees another) and "self" (the rows
            are compared with autograd's gradient).

    Raises:
        BadInputs: `unchecked` names something else, `wrt` inputs, or the model has no such method.
    """
    if not CHECKS.issuperset(unchecked):
        raise BadInputs(f"unchecked: expected some of {sorted(CHECKS)}, got {sorted(unchecked)}")
    selection = select(model, wrt)
    _refuse_inputs([name for name, needed in selection.input_patterns.items() if needed])
    _refuse_other_parameters(selection.parameters)
    call_options = CallOptions(**options)
    with prepared(model, groups, selection, call_options) as ready, compiled_code_run_eagerly():
        yield CallableModel(ready, dict(selection.parameters), frozenset(unchecked))


class CallableModel:
    """One model that is set up."""

    def __init__(
        self, ready: Prepared, parameters: dict[str, Tensor], unchecked: frozenset[str]
    ) -> None:
        self.model, self.parameters, self.unchecked = ready.model, parameters, unchecked
        self.options, self.device, self.feed = ready.options, ready.device, ready.feed
        self.on_several_devices = len(ready.devices) > 1
        self.where = ready.calls.where
        # The narrowest dtype of a product.
        self.rounding = AUTOCAST.get(ready.options.precision, torch.float64)
        self.in_float16 = ready.in_float16
        self.hooked = tuple(name for name, p in parameters.items() if hooks_on_gradient(p))
        self.recomputation = ready.calls.recomputation
        self._groups, self._calls, self._buffers = ready.calls.groups, ready.calls, ready.buffers

    def shard(self, position: Position) -> Shard:
        """Return a shard where it lies, to be looked at and not called with."""
        return self._groups[position.group].shards[position.shard]

    def form(self, position: Position) -> Shard:
        """Return a shard of which nothing but shapes and dtypes is looked at."""
        return form_of(self._groups[position.group].shards, position.shard)

    def begin(self, position: Position) -> None:
        """Begin a shard's random stream, as its call does."""
        self._calls.begin(position)

    def restore_buffers(self) -> None:
        """Give the buffers the values that they had when the job began."""
        self._buffers.restore(self._buffers.first)

    def recomputes(self, position: Position) -> bool:
        """Return whether a shard's blocks are computed again in its backward passes."""
        asked = self.recomputation
        return asked.in_force and asked.wanted(position, self.form(position))

    def call(
        self,
        position: Position,
        arguments: dict[str, Any],
        *,
        observed: AbstractContextManager[object] = NOTHING,
    ) -> Tensor:
        """Return z of a shard, or of some of its samples: one row a sample, in float32 or wider.

        Args:
            arguments: copies, to which the model may write.
            observed: a function mode, which sees what the model calls.
        """
        recompute = self.recomputes(position)
        with torch.enable_grad(), checkpoints_inlined():
            graph = self._calls(position, arguments, recompute=recompute, observed=observed)
            z = graph.outputs.get(BARE)
            if z is None or z.dim() == 0:
                raise NoBatchAxis(
                    "per-sample quantities need one output tensor whose dim 0 counts samples, got "
                    f"{'several' if z is None else 'a single number'}: use output= or readout="
                )
            return z.to(accumulation_dtype(z.dtype))

    def zeros(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that are all zero when a job begins."""
        self._buffers.restore(self._buffers.first)
        return frozenset(name for name, tensor in self._tensors().items() if _all_zero(tensor))

    def all_zero(self, names: Collection[str]) -> bool:
        """Return whether these parameters and buffers are all zero."""
        tensors = self._tensors() if names else {}
        return all(name in tensors and _all_zero(tensors[name]) for name in names)

    def _tensors(self) -> dict[str, Tensor]:
        return dict(chain(self.model.named_parameters(), self.model.named_buffers()))

    def signature(self, group: int, shapes: Shapes) -> tuple[Any, ...]:
        """Return what a plan for a shard of a group depends on."""
        options = self.options
        return (
            options.mode, options.precision, self._groups[group].method, options.output,
            options.readout, tuple(self.parameters), self.hooked, self.unchecked, shapes,
        )  # fmt: skip


def form_of(shards: Sequence[Shard], index: int) -> Shard:
    """Return a shard unread, if its sequence can: see `Group`."""
    unread = getattr(shards, "form", shards.__getitem__)
    form: Shard = unread(index)
    return form


def shapes_of(form: Shard) -> Shapes:
    """Return what a plan depends on of a shard."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, repr(value), None)
        for name, value in form.items()
    )


def _all_zero(tensor: Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor):
        return all(map(_all_zero, strided_parts(tensor)))
    dense = tensor.to_dense()
    last = dense[-1:] if dense.dim() else dense  # mostly tells, where a table's first row pads
    return not (last.any() or dense.any())


def _refuse_inputs(patterns: Collection[str]) -> None:
    if patterns:
        raise BadInputs(
            f"wrt: expected names of parameters, of which every sample has a row, got "
            f"{[INPUTS + pattern for pattern in patterns]}; a Gradient of the sum over samples "
            f"holds every sample's gradient with respect to its own inputs"
        )


def _refuse_other_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise BadInputs(
            "wrt: expected a model with floating-point parameters, by which rows are made, got one "
            "without any; a Gradient with returns='input_grads' differentiates by its inputs"
        )
    names = [name for name, parameter in parameters.items() if parameter.is_complex()]
    if names:
        raise BadInputs(
            f"wrt: expected real parameters, got the complex {names}: leave them out by wrt=, or "
            "let the model hold them as real ones, by torch.view_as_real"
        )
