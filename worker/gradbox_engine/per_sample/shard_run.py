"""A shard run forward by its plan, and its rows checked against autograd.

What is compared (`planning.verify`) is decided once, when the shard's graph is there:

    nothing           under a plan that was confirmed, but for what the next lines say
    one row alone     once in a job, on its first shard, where a row is due: z of a sample drawn by
                      the job's seed is that of a call on it alone, and its row autograd's in that
                      call's graph
    one row in graph  the same where the forward pass draws random numbers or rounds to 16 bits, or
                      the model takes no sample alone: the row is autograd's in the shard's graph
    all rows          until a shard with these calls has confirmed every parameter, by a gradient
                      that is not zero; and on every shard where data decide which samples go where.
                      Where samples can be called alone, z of the drawn one is compared as well

A row is due in every job of 64 samples or more, and in one of fewer with probability
num_samples / 64: the comparison costs up to a third of a step of 8 samples. Which jobs these are is
decided by a number that the caller gives, see `PlannedModel.row_is_due`. It is due in every job, on
the first shard of each shape, where data may decide a number that samples share (a scale by
`max()`, a length by `.item()`), see `recording.shared_numbers`.

That the loss keeps samples apart is seen by numbers on every shard, and by its derivative on a
job's first shard and wherever rows are compared.

Where rows or z differ, the plan is made anew on the shard at hand, which replaces a sample and may
name the module that couples it with others. Else another z is refused, and after other rows
all are compared: parameters whose rows then still differ take one backward pass a sample.

Cost beyond the rows, where a row is due: a forward and a backward pass of one sample, or a backward
pass of the shard; in every job two backward passes of the loss, on every shard one evaluation of
it. For a new plan: a forward pass of one sample, one backward pass of the shard and the rows'
weighted sum.

Limits: what passes between samples is seen by its derivative, and by z of the drawn sample. A
dependence without (through `detach`, a rank, an argmax) is seen where a plan is made, if replacing
one sample shows it; else in the drawn sample alone, where one is, unless this is the one on which
others depend.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.per_sample.backward import Head, RecordedGraph, Terms
from gradbox_engine.per_sample.gradients import leaf_gradients
from gradbox_engine.per_sample.planned_model import PlannedModel
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
from gradbox_engine.per_sample.request import RowsCompared, most_compared


class Compared(Enum):
    """What of a shard's rows is compared with autograd's."""

    NOTHING = auto()
    ONE_ROW_ALONE = auto()
    ONE_ROW_IN_GRAPH = auto()
    ALL_ROWS = auto()


class ShardRun:
    """One shard's graph and its rows.

    Args:
        head: maps z (B, ...) to what is differentiated, (B, Y).
        loss: whether `head` is a loss, which may mix samples.
        first: whether this is the first shard of the job that runs here.
        row_is_due: whether a row is compared, see `PlannedModel.row_is_due`.

    Raises:
        CoupledSamples: one sample's output or loss depends on another sample.
        NoBatchAxis: the samples cannot be found.
    """

    def __init__(
        self,
        model: PlannedModel,
        position: Position,
        head: Head,
        *,
        loss: bool,
        first: bool = True,
        row_is_due: bool = True,
    ) -> None:
        self._model, self._position, self._head, self._loss = model, position, head, loss
        self._parameters, self._seed = model.model.parameters, model.model.options.seed
        self._coupling_refused = "coupling" not in model.model.unchecked
        self._confirmed: set[str] = set()  # by the outputs so far
        self.compared: RowsCompared = "none"
        self._used = self._model.plan(position)
        self._first = first
        self._row_is_due = row_is_due or (self._used.first and self._used.plan.shares_numbers)
        self._used.first = False
        self.graph = self._graph()
        if self.graph.deviated:
            self._plan_anew(samples=self._model.count(self._position))
        else:
            self._compared = self._decided()
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
        return blaming("the backward pass", self._model.model.where(self._position))

    def check_alone(self) -> None:
        """Do the check of z for a job that takes no terms, on its first shard of a shape.

        The graph is freed.

        Raises:
            CoupledSamples: z of the drawn sample called alone is not that of the batch.
        """
        row = draw_row(self.graph.z, None, range(self.graph.outputs), seed=self._seed)
        if row is not None and self._row_is_due and self._calls_alone():
            self._called_alone(row.sample)

    def _terms(self, outputs: range, *, last: bool) -> Terms:
        all_rows = self._compared is Compared.ALL_ROWS
        one_row = self._compared is not Compared.NOTHING and not all_rows and not outputs.start
        alone = last and (
            self._compared is Compared.ONE_ROW_ALONE or (all_rows and self._calls_alone())
        )
        if not (all_rows or one_row or alone):
            slopes = self._slopes() if self._first else None
            return self.graph.terms(outputs, keep_graph=not last, slopes=slopes)
        slopes = self._slopes()
        row = draw_row(self.graph.z, slopes, outputs, seed=self._seed) if one_row or alone else None
        in_graph = all_rows or (row is not None and not alone)
        terms = self.graph.terms(outputs, keep_graph=in_graph or not last, slopes=slopes)
        if all_rows:
            wrong = self._wrong(terms, slopes, outputs)
            if wrong and self._used.made_on != self._position:
                return self._terms_anew(outputs, last=last)
            if wrong:
                terms = self._looped(wrong, outputs)
        if row is not None:
            used = self._used
            z = self._called_alone(row.sample) if alone else None
            if self._used is not used:  # a new plan, under which no sample is called alone
                return self._terms(outputs, last=last)
            if one_row and not self._row_holds(row, terms, z):
                return self._terms_anew(outputs, last=last)
        if last:
            self.graph.free()
            if self._confirmed or (all_rows and row is not None):
                self.plan.confirmed.setdefault(self.graph.calls, set()).update(self._confirmed)
        return terms

    def _decided(self) -> Compared:
        """Decide what is compared of this shard."""
        if "self" in self._model.model.unchecked:
            return Compared.NOTHING
        confirmed = self.plan.confirmed.get(self.graph.calls)
        if self.plan.compares_always or confirmed is None or not self._ruled().keys() <= confirmed:
            return Compared.ALL_ROWS
        if not self._row_is_due:
            return Compared.NOTHING
        return Compared.ONE_ROW_ALONE if self._calls_alone() else Compared.ONE_ROW_IN_GRAPH

    def _calls_alone(self) -> bool:
        """Return whether a sample can be called alone, to compare its z."""
        checks = self._model.model.unchecked
        return self.plan.alone and not checks and self.graph.samples > 1

    def _ruled(self) -> dict[str, Tensor]:
        """Return the parameters that are not looped over."""
        return {name: p for name, p in self._parameters.items() if name not in self.plan.loops}

    def _slopes(self) -> Tensor | None:
        """Return ∂ℓ_b/∂z_b, having seen that they are of b alone; None for z's entries."""
        if not self._loss:
            return None
        z, value = self.graph.z, self.graph.value
        slopes = loss_slopes(z, value)
        if slopes is not None and self._coupling_refused:
            check_slopes(z, value, slopes, seed=self._seed)
        return slopes

    def _wrong(self, terms: Terms, slopes: Tensor | None, outputs: range) -> Set[str]:
        """Compare all rows with autograd's, and return the parameters whose rows differ."""
        self.compared = "all"
        some = slice(outputs.start, outputs.stop)
        gradient_at = partial(self.graph.leaf_gradients, parameters=self._ruled(), outputs=some)
        expected = reference(slopes, self.graph.value[:, some], gradient_at, seed=self._seed)
        comparison = compare(expected, terms, rounding=self.plan.rounding)
        self._confirmed |= comparison.confirmed
        return comparison.wrong

    def _looped(self, wrong: Set[str], outputs: range) -> Terms:
        """Return the terms with those of some parameters by one backward pass a sample."""
        why = "its rule's result differed from autograd's"
        self.plan.loop(wrong, why)
        if self.plan.loop_where_vectorised(why):
            self.graph.free()
            self.graph = self._graph()
        return self.graph.terms(outputs, keep_graph=True)

    def _row_holds(self, row: DrawnRow, terms: Terms, z: Tensor | None) -> bool:
        """Compare the drawn row with autograd's, from z of its sample alone or in the graph."""
        cotangent, in_graph = row.cotangent, z is None
        if z is None:
            z, cotangent = self.graph.z, torch.zeros_like(self.graph.z)
            cotangent[row.sample : row.sample + 1] = row.cotangent
        gradients = leaf_gradients(
            z,
            self._ruled(),
            cotangent,
            leaves=self._parameters,
            keep_graph=in_graph,
            in_float16=self._model.model.in_float16,
        )
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
        self.compared = most_compared((self.compared, "one"))
        z = self._model.called_alone(self.plan, self._position, sample)
        if z is None or z.shape[1:] != expected.shape[1:] or len(z) != 1:
            self.plan.alone = False
            if self._compared is Compared.ONE_ROW_ALONE:
                self.graph = self._graph()
            return None
        change = output_change(z, expected, sample, rounding=self.plan.rounding)
        if not change:
            return z
        self._plan_anew()  # which names the module, where a replaced sample shows it
        if self.plan.alone:
            where = self._model.model.where(self._position)
            raise CoupledSamples(
                f"{where}: expected z of sample {sample} called alone to be that of the batch, got "
                f"one that differs by {change:.2g} of its norm: the samples decide something for "
                f"each other without a derivative, as a number of steps, a length or a scale that "
                f"the model reads from all of them by .item() or max(). Let each sample decide for "
                f"itself; unchecked=('coupling',) takes the rows that the batch gives"
            )
        return None

    def _terms_anew(self, outputs: range, *, last: bool) -> Terms:
        """Return the terms by a new plan, all compared."""
        self._plan_anew()
        return self._terms(outputs, last=last)

    def _plan_anew(self, *, samples: int = SAMPLES) -> None:
        self.graph.free()  # one graph at a time
        self._confirmed.clear()
        self._used = self._model.plan_anew(self._position, samples=samples)
        self._used.first = False
        self.graph = self._graph()
        if self.graph.deviated:
            why = "the model's calls differ from run to run"
            self.plan.loop_over_all(self._parameters, why)
            self.graph = self._graph()
        self._compared = self._decided()

    def _graph(self) -> RecordedGraph:
        return self._model.graph(self.plan, self._position, self._head)
