"""A shard run forward by its plan, and its rows checked against autograd.

What is compared (`planning.verify`), and when:

    all rows    of a parameter, on the first shard where its gradient is not zero under a new plan;
                of all parameters, on every shard where data decide which samples go where, and on
                a shard that calls other functions than those confirmed
    one row     of a sample drawn by the job's seed, in every job on the first shard of each shape
    one z       of that sample called alone against the batch's: there, and wherever rows are
                compared on every shard or under other calls. Then the row is compared in the graph
                of this call; where the forward pass draws random numbers or rounds to 16 bits, or
                the model takes no sample alone, in the shard's own graph and no z is
    the loss    that it keeps samples apart: by numbers on every shard, by its derivative on the
                first of each shape

Where rows or z differ, the plan is made anew on the shard at hand, which replaces a sample and may
name the module that couples it with others. Else another z is refused, and after other rows
all are compared: parameters whose rows then still differ take one backward pass a sample.

Cost beyond the rows, in every job: a forward and a backward pass of one sample, or a backward pass
of the shard; on every shard one evaluation of the loss. For a new plan: a forward pass of one
sample, one backward pass of the shard and the rows' weighted sum.

Limits: what passes between samples is seen by its derivative, and by z of the drawn sample. A
dependence without (through `detach`, a rank, an argmax) is seen where a plan is made, if replacing
one sample shows it; else in the drawn sample alone, unless this is the one on which others depend.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
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
    output_change,
    reference,
)
from gradbox_factors import Block

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Checks:
    """What of a shard is compared, decided once when its graph is there."""

    whole: Parameters  # the parameters of which all rows are
    row: Parameters  # those of which the drawn sample's row is
    alone: bool  # whether the drawn sample is called alone, and its z compared
    first: bool  # whether the shard is the job's first of its shape


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
        else:
            self._checks = self._decided()
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

    def check_alone(self) -> None:
        """Do the check of z for a job that takes no terms, on its first shard of a shape.

        The graph is freed.

        Raises:
            CoupledSamples: z of the drawn sample called alone is not that of the batch.
        """
        row = draw_row(self.graph.z, None, range(self.graph.outputs), seed=self._seed)
        if row is not None and self._checks.alone and self._checks.first:
            self._called_alone(row.sample)

    def _terms(self, outputs: range, *, last: bool) -> Terms:
        whole = self._checks.whole
        of_row = {} if outputs.start else self._checks.row
        alone = last and self._checks.alone
        if not (whole or of_row or alone):
            return self._graph_terms(outputs, keep_graph=not last)
        slopes = self._slopes()
        row = draw_row(self.graph.z, slopes, outputs, seed=self._seed) if of_row or alone else None
        in_graph = bool(whole) or (row is not None and not alone)
        terms = self._graph_terms(outputs, keep_graph=in_graph or not last, slopes=slopes)
        if whole:
            wrong = self._compared(terms, whole, slopes, outputs)
            if wrong and self._used.made_on != self._index:
                return self._terms_anew(outputs, last=last)
            if wrong:
                terms = self._looped(wrong, outputs)
        if row is not None:
            used = self._used
            z = self._called_alone(row.sample) if alone else None
            if self._used is not used:  # a new plan, under which no sample is called alone
                return self._terms(outputs, last=last)
            if of_row and not self._row_holds(row, of_row, terms, z):
                return self._terms_anew(outputs, last=last)
        if last:
            self.graph.free()
            self.plan.unconfirmed -= self._confirmed
            if whole or row is not None:
                self.plan.confirmed_calls.add(self.graph.calls)
        return terms

    def _decided(self) -> Checks:
        """Decide what is compared of this shard."""
        plan, first = self.plan, not self._used.checked
        self._used.checked = True
        if "self" in self._model.model.unchecked:
            return Checks({}, {}, alone=False, first=first)
        unknown = plan.compares_always or self.graph.calls not in plan.confirmed_calls
        ruled = {name: p for name, p in self._parameters.items() if name not in plan.loops}
        whole = {name: p for name, p in ruled.items() if unknown or name in plan.unconfirmed}
        row = {name: p for name, p in ruled.items() if first and name not in whole}
        callable_alone = plan.alone and self._coupling_refused and self.graph.samples > 1
        return Checks(whole, row, alone=callable_alone and (first or unknown), first=first)

    def _slopes(self) -> Tensor | None:
        """Return ∂ℓ_b/∂z_b, None for z's entries; the first time, see that they are of b alone."""
        if not self._loss:
            return None
        z, value = self.graph.z, self.graph.value
        slopes = loss_slopes(z, value)
        if slopes is not None and self._coupling_refused and self._checks.first:
            check_slopes(z, value, slopes, seed=self._seed)
        return slopes

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
        return self._graph_terms(outputs, keep_graph=True)

    def _row_holds(
        self, row: DrawnRow, parameters: Parameters, terms: Terms, z: Tensor | None
    ) -> bool:
        """Compare the drawn row with autograd's, from z of its sample alone or in the graph."""
        cotangent, in_graph = row.cotangent, z is None
        if z is None:
            z, cotangent = self.graph.z, torch.zeros_like(self.graph.z)
            cotangent[row.sample : row.sample + 1] = row.cotangent
        leaves = self._parameters
        gradients = leaf_gradients(z, parameters, cotangent, leaves=leaves, keep_graph=in_graph)
        samples = slice(row.sample, row.sample + 1)
        rows = {
            name: terms[name].narrow(samples, slice(0, terms[name].outputs)) for name in gradients
        }
        expected = Reference(row.weights, gradients)
        return not compare(expected, rows, rounding=self.plan.rounding).wrong

    def _called_alone(self, sample: int) -> Tensor | None:
        """Return z of a call on one sample, which is that of the batch.

        None, and the shard's graph anew for its row, where the model takes no sample alone, or
        where a new plan shows that it draws random numbers.

        Raises:
            CoupledSamples: it is another z.
        """
        self.graph.free()  # before a call that restores the buffers, which the graph may read
        expected = self.graph.z
        z = self._model.called_alone(self.plan, self._arguments, self._index, sample)
        if z is None or z.shape[1:] != expected.shape[1:] or len(z) != 1:
            self.plan.alone = False
            if self._checks.row:
                self.graph = self._graph()
            return None
        change = output_change(z, expected, sample, rounding=self.plan.rounding)
        if not change:
            return z
        self._plan_anew()  # which names the module, where a replaced sample shows it
        if self.plan.alone:
            where = self._model.model.where(self._index)
            raise CoupledSamples(
                f"{where}: expected z of sample {sample} called alone to be that of the batch, got "
                f"one that differs by {change:.2g} of its norm: the samples decide something for "
                f"each other without a derivative, as a number of steps, a length or a scale that "
                f"the model reads from all of them by .item() or max(). Let each sample decide for "
                f"itself; unchecked=('coupling',) takes the rows that the batch gives"
            )
        return None

    def _graph_terms(
        self, outputs: range, *, keep_graph: bool, slopes: Tensor | None = None
    ) -> Terms:
        """Return the terms of the shard's graph.

        One backward pass a sample adds 0 × NaN where another sample is not finite in the model.
        Rows that are not finite are taken again from a call with their own sample in every place.
        """
        terms = self.graph.terms(outputs, keep_graph=keep_graph, slopes=slopes)
        arrays = {
            name: term.array
            for name, term in terms.items()
            if name in self.plan.loops and isinstance(term, Block)
        }
        if not arrays or self.graph.samples == 1:
            return terms
        finite = [array.flatten(1).isfinite().all(1) for array in arrays.values()]
        for sample in (~torch.stack(finite).all(0)).nonzero()[:, 0].tolist():
            z = self._model.called_alone(
                self.plan, self._arguments, self._index, sample, in_every_place=True
            )
            if z is not None and z.shape == self.graph.z.shape:
                for name, row in self.graph.looped(outputs, [sample], z=z).items():
                    arrays[name][sample] = row[0]
        return terms

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
        self._checks = self._decided()

    def _graph(self) -> RecordedGraph:
        return self._model.graph(self._used.plan, self._arguments, self._index, self._head)
