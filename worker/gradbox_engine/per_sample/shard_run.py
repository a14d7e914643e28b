"""A shard run forward by its plan, and its rows checked against autograd.

What is compared (`planning.verify`), and when:

    all rows    of a parameter, on the first shard where its gradient is not zero under a new plan;
                of all parameters, on every shard where data decide which samples go where, and on
                a shard that calls other functions than those confirmed
    one row     of a sample drawn by the job's seed, in every job on the first shard of each shape:
                with a call on that sample alone, or, where the forward pass draws random numbers or
                rounds to 16 bits, or is of so few samples that a further call would cost more, in
                the shard's own graph
    the loss    that it keeps samples apart: by numbers on every shard, by its derivative on the
                first of each shape

Where rows differ, the plan is made anew on the shard at hand, which replaces a sample and names the
module that couples it with others, and all rows are compared. Parameters whose rows then still
differ take one backward pass a sample.

Cost beyond the rows, in every job: a forward and a backward pass of one sample, or a backward pass
of the shard; on every shard one evaluation of the loss. For a new plan: one backward pass of the
shard and the rows' weighted sum.

Limits: what passes between samples is seen by its derivative, and by z of the drawn sample. A
dependence without (through `detach`, a rank, an argmax) is seen where a plan is made, and a plan is
valid only while the parameters and buffers that were all zero then still are; brought in later, by
data or by an entry of a weight, it is seen in the drawn sample alone. Nor is one seen whose rows
all come from a loop: they are the derivatives of the coupled losses.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.per_sample.backward import RecordedGraph, Terms
from gradbox_engine.per_sample.gradients import leaf_gradients
from gradbox_engine.per_sample.planned_model import Head, PlannedModel
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.planning.probe_runs import SAMPLES
from gradbox_engine.per_sample.planning.verify import (
    DrawnRow,
    Reference,
    check_head,
    check_slopes,
    compare,
    draw_row,
    loss_slopes,
    reference,
    same_output,
)

Parameters = dict[str, Tensor]


class ShardRun:
    """One shard's graph and its rows.

    Args:
        head: maps z (B, ...) to what is differentiated, (B, Y).
        loss: whether `head` is a loss, which may mix samples.

    Raises:
        CoupledSamples: one sample's output or loss depends on another sample.
        NoBatchAxis: the samples cannot be found.
    """

    def __init__(
        self, model: PlannedModel, arguments: dict[str, Any], index: int, head: Head, *, loss: bool
    ) -> None:
        self._model, self._arguments, self._index = model, arguments, index
        self._head, self._loss = head, loss
        self._parameters, self._seed = model.model.parameters, model.model.options.seed
        self._coupling_refused = "coupling" not in model.model.unchecked
        self.graph: RecordedGraph
        self.start()

    def start(self) -> None:
        """Run the shard forward, again where it has run."""
        self._used = self._model.plan(self._arguments, self._index)
        self._confirmed: set[str] = set()  # by the outputs so far
        self.graph = self._graph()
        if self.graph.deviated:
            self._plan_anew(on_all_samples=True)
        if self._loss and self._coupling_refused:
            check_head(self.graph.z.detach(), self.graph.value.detach(), self._head)

    @property
    def plan(self) -> Plan:
        """The plan by which the shard runs."""
        return self._used.plan

    def terms(self, outputs: range, *, last: bool) -> Terms:
        """Return every parameter's term for some outputs, checked; `last` frees the graph.

        Raises:
            ModelCallFailed: the backward pass raised an error.
        """
        with self.blaming_backward():
            return self._terms(outputs, last=last)

    def blaming_backward(self) -> blaming:
        """Return the context in which errors are those of this shard's backward pass."""
        return blaming("the backward pass", self._model.model.where(self._index))

    def _terms(self, outputs: range, *, last: bool) -> Terms:
        whole, of_row = self._to_compare()
        if not whole and not of_row:
            return self.graph.terms(outputs, keep_graph=not last)
        slopes = self._slopes()
        self._used.checked = True
        row = draw_row(self.graph.z, slopes, outputs, seed=self._seed) if of_row else None
        alone = row is not None and last and self._callable_alone
        in_graph = bool(whole) or (row is not None and not alone)
        terms = self.graph.terms(outputs, keep_graph=in_graph or not last)
        if whole:
            wrong = self._compared(terms, whole, slopes, outputs)
            if wrong and self._used.made_on != self._index:
                return self._terms_anew(outputs, last=last)
            if wrong:
                terms = self._looped(wrong, outputs)
            if last:
                self.plan.unconfirmed -= self._confirmed
                self.plan.confirmed_calls.add(self.graph.calls)
        if alone:  # before a call that restores the buffers, which the graph may read
            self.graph.free()
        if row is not None and not self._row_holds(row, of_row, terms, alone=alone):
            return self._terms_anew(outputs, last=last)
        if last:
            self.graph.free()
        return terms

    def _to_compare(self) -> tuple[Parameters, Parameters]:
        """Return the parameters whose rows are compared in whole, and those of the drawn row.

        Parameters of a loop have their rows from autograd.
        """
        plan = self.plan
        if "self" in self._model.model.unchecked:
            return {}, {}
        ruled = {name: p for name, p in self._parameters.items() if name not in plan.loops}
        if plan.compares_always or self.graph.calls not in plan.confirmed_calls:
            return ruled, {}
        new = {name: parameter for name, parameter in ruled.items() if name in plan.unconfirmed}
        drawn = {} if self._used.checked else ruled
        return new, {name: p for name, p in drawn.items() if name not in new}

    def _slopes(self) -> Tensor | None:
        """Return ∂ℓ_b/∂z_b, None for z's entries; the first time, see that they are of b alone."""
        if not self._loss:
            return None
        z, value = self.graph.z, self.graph.value
        slopes = loss_slopes(z, value)
        if slopes is not None and self._coupling_refused and not self._used.checked:
            check_slopes(z, value, slopes, seed=self._seed)
        return slopes

    @property
    def _callable_alone(self) -> bool:
        """Whether the drawn sample is called alone: its z is that of the batch, but for rounding.

        Fewer than three samples cost less in their own graph.
        """
        return self.plan.alone and self._coupling_refused and self.graph.samples > 2

    def _compared(
        self, terms: Terms, parameters: Parameters, slopes: Tensor | None, outputs: range
    ) -> Set[str]:
        """Compare all rows with autograd's, and return the parameters whose rows differ."""
        value_BY = self.graph.value[:, outputs.start : outputs.stop]
        expected = reference(slopes, value_BY, parameters, leaves=self._parameters, seed=self._seed)
        found = compare(expected, terms, rounding=self.plan.rounding)
        self._confirmed |= found.confirmed | found.wrong
        return found.wrong

    def _looped(self, wrong: Set[str], outputs: range) -> Terms:
        """Return the terms with those of some parameters by one backward pass a sample."""
        why = "its rule's result differed from autograd's"
        self.plan.loop(wrong, why)
        if self.plan.loop_where_vectorised(why):
            self.graph.free()
            self.graph = self._graph()
        return self.graph.terms(outputs, keep_graph=True)

    def _row_holds(
        self, row: DrawnRow, parameters: Parameters, terms: Terms, *, alone: bool
    ) -> bool:
        """Compare the drawn row with autograd's, of a call on its sample alone or of the graph."""
        z = self._called_alone(row.sample) if alone else None
        if z is None:
            z, cotangent = self.graph.z, torch.zeros_like(self.graph.z)
            cotangent[row.sample : row.sample + 1] = row.cotangent
        elif same_output(z, self._z_of(row.sample), rounding=self.plan.rounding):
            cotangent = row.cotangent
        else:
            return False
        leaves, in_graph = self._parameters, z is self.graph.z
        gradients = leaf_gradients(z, parameters, cotangent, leaves=leaves, keep_graph=in_graph)
        samples = slice(row.sample, row.sample + 1)
        rows = {
            name: terms[name].narrow(samples, slice(0, terms[name].outputs)) for name in gradients
        }
        expected = Reference(row.weights, gradients)
        return not compare(expected, rows, rounding=self.plan.rounding).wrong

    def _called_alone(self, sample: int) -> Tensor | None:
        """Return z of a call on one sample; None, and the shard's graph anew, where that fails."""
        z = self._model.called_alone(self.plan, self._arguments, self._index, sample)
        if z is not None and z.shape == self._z_of(sample).shape:
            return z
        self.plan.alone = False
        self.graph = self._graph()
        return None

    def _z_of(self, sample: int) -> Tensor:
        return self.graph.z.detach().narrow(0, sample, 1)

    def _terms_anew(self, outputs: range, *, last: bool) -> Terms:
        """Return the terms by a new plan, all compared."""
        self._plan_anew()
        return self._terms(outputs, last=last)

    def _plan_anew(self, *, on_all_samples: bool = False) -> None:
        samples = self._model.count(self._arguments, self._index) if on_all_samples else SAMPLES
        self.graph.free()  # one graph at a time
        self._confirmed.clear()
        self._used = self._model.plan_anew(self._arguments, self._index, samples=samples)
        self.graph = self._graph()
        if self.graph.deviated:
            why = "the model's calls differ from run to run"
            self.plan.loop_over_all(self._parameters, why)
            self.graph = self._graph()

    def _graph(self) -> RecordedGraph:
        return self._model.graph(self._used.plan, self._arguments, self._index, self._head)
