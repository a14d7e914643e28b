"""A shard run forward by its plan, and its rows checked against autograd.

One rule: wherever a job first compares a parameter's rows at a gradient that is not zero, they are
compared with autograd's (`planning.verify`). For almost every model that is the first shard of each
shape. Where data decide which samples go where, the rows of every shard are compared. That the loss
keeps samples apart is checked on every shard.

A plan that does not hold is made anew on the shard at hand, which replaces a sample and names the
module that couples it with others; parameters whose rows then still differ take one backward pass a
sample.

Cost beyond the rows, on the first shard of each shape: one backward pass and the rows' weighted
sum; on every shard: one evaluation of the loss.

Limits: the comparison sees a dependence between samples by its derivative. One without (through
`detach`, a rank, an argmax) is seen where a plan is made, and a plan is valid only while the
parameters and buffers that were all zero then still are; brought in later, by data or by an entry
of a weight, it is not seen. Nor is one whose rows all come from a loop: they are the derivatives of
the coupled losses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradbox_engine.errors import NoBatchAxis
from gradbox_engine.model.blame import blaming
from gradbox_engine.per_sample.backward import RecordedGraph, Terms
from gradbox_engine.per_sample.planning.model import CallableModel, copied
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.planning.probe_runs import SAMPLES, plan_for
from gradbox_engine.per_sample.planning.verify import Reference, check_head, compare, reference

MOST_PLANS = 64  # of a model; a readout that a job brings makes a plan of its own

_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()

Head = Callable[[Tensor], Tensor]


@dataclass
class PlanInUse:
    """A plan and what this job has confirmed of it."""

    plan: Plan
    made_on: int | None  # the shard on which this job made it; None: an earlier job did
    since: int  # the shard from which on it is used, on which it was made or found valid
    unconfirmed: set[str]  # parameters whose rows were not yet compared at a gradient not zero


class PlannedModel:
    """A model and the plans of one job, by the shapes of its shards."""

    def __init__(self, model: CallableModel) -> None:
        self.model = model
        self._in_use: dict[Any, PlanInUse] = {}

    def count(self, arguments: dict[str, Any], index: int) -> int:
        """Return how many samples a shard has."""
        samples = self.plan(arguments, index).plan.samples(arguments)
        if samples is None:
            raise NoBatchAxis(f"shard {index}: expected a tensor that holds samples, got none")
        return samples

    def plan(self, arguments: dict[str, Any], index: int) -> PlanInUse:
        """Return the plan for a shard's shapes, made if no job has."""
        signature = self.model.signature(arguments)
        used = self._in_use.get(signature)
        if used is not None:
            return used
        plan = _plans.get(self.model.model, {}).get(signature)
        if plan is None or not self.model.all_zero(plan.zeros):
            return self.plan_anew(arguments, index)
        return self._use(signature, PlanInUse(plan, None, index, set(self.model.parameters)))

    def plan_anew(
        self, arguments: dict[str, Any], index: int, *, samples: int = SAMPLES
    ) -> PlanInUse:
        """Make a plan on this shard, in place of one that there may be."""
        with blaming("the model", f"shard {index}", model=self.model.model, arguments=arguments):
            plan = plan_for(self.model, arguments, index, samples=samples)
        signature = self.model.signature(arguments)
        plans = _plans.setdefault(self.model.model, {})
        plans[signature] = plan
        while len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
        return self._use(signature, PlanInUse(plan, index, index, set(self.model.parameters)))

    def graph(self, plan: Plan, arguments: dict[str, Any], index: int, head: Head) -> RecordedGraph:
        """Run a shard forward."""
        # Before the call and not after it: the graph may read what the call wrote.
        self.model.restore_buffers()
        self.model.begin_stream(index)
        where = f"shard {index}"
        with blaming("the model or the loss", where, model=self.model.model, arguments=arguments):
            return RecordedGraph(self.model, plan, copied(arguments), head)

    def loops(self) -> list[dict[str, str]]:
        """Return why parameters are looped over, for each plan in use, by their first shards."""
        return [dict(used.plan.loops) for used in self._in_use.values()]

    def resume(self, loops: Sequence[Mapping[str, str]], *, first: int) -> None:
        """Loop over what another process found to need it; rows are compared all the same.

        Args:
            loops: what `loops` returned there, after it had counted the same shards.
            first: the shard from which on this process computes.
        """
        for used, found in zip(self._in_use.values(), loops, strict=True):
            used.plan.loops.update(found)
            used.since = first

    def _use(self, signature: Any, used: PlanInUse) -> PlanInUse:
        self._in_use[signature] = used
        return used


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
        self.graph: RecordedGraph
        self.start()

    def start(self) -> None:
        """Run the shard forward, again where it has run."""
        self._used = self._model.plan(self._arguments, self._index)
        self.graph = self._graph()
        if self.graph.deviated:
            self._plan_anew(on_all_samples=True)
        if self.graph.deviated:
            self._used.plan.loop_over_all(
                self._model.model.parameters, "the model's calls differ from run to run"
            )
            self.graph = self._graph()
        if self._loss and "coupling" not in self._model.model.unchecked:
            check_head(self.graph.z.detach(), self.graph.value.detach(), self._head)

    @property
    def plan(self) -> Plan:
        """The plan by which the shard runs."""
        return self._used.plan

    def terms(self, outputs: range, *, last: bool) -> Terms:
        """Return every parameter's term for some outputs, checked; `last` frees the graph."""
        names = self._to_compare()
        if not names:
            return self.graph.terms(outputs, keep_graph=not last)
        expected = self._reference(names, outputs)
        terms = self.graph.terms(outputs, keep_graph=not (last and expected.empty))
        if not expected.empty:
            terms = self._compared(terms, expected, outputs)
        if last:
            self.graph.free()
        return terms

    def _compared(self, terms: Terms, expected: Reference, outputs: range) -> Terms:
        """Return the terms if they are autograd's, else those of a new plan or of a loop."""
        rounding = self._model.model.rounding
        found = compare(expected, terms, rounding=rounding)
        # A gradient that was zero until now may have hidden a dependence between samples as well.
        late = self._used.since != self._index and found.confirmed & self._used.unconfirmed
        if late or (found.wrong and self._used.made_on != self._index):
            self._plan_anew()
            expected = self._reference(self._to_compare(), outputs)
            terms = self.graph.terms(outputs, keep_graph=True)
            found = compare(expected, terms, rounding=rounding)
        if found.wrong:
            self.plan.loop(found.wrong, "its rule's result differed from autograd's")
            terms = self.graph.terms(outputs, keep_graph=True)
        self._used.unconfirmed -= found.confirmed | found.wrong
        return terms

    def _to_compare(self) -> list[str]:
        """Return the parameters whose rows are to be compared; those of a loop are autograd's."""
        if "self" in self._model.model.unchecked:
            return []
        every_shard = self.plan.reorders
        return [
            name
            for name in self._model.model.parameters
            if name not in self.plan.loops and (every_shard or name in self._used.unconfirmed)
        ]

    def _reference(self, names: list[str], outputs: range) -> Reference:
        value_BY = self.graph.value[:, outputs.start : outputs.stop]
        model = self._model.model
        parameters = {name: model.parameters[name] for name in names}
        z = self.graph.z if self._loss else None
        return reference(z, value_BY, parameters, seed=model.options.seed)

    def _plan_anew(self, *, on_all_samples: bool = False) -> None:
        samples = self._model.count(self._arguments, self._index) if on_all_samples else SAMPLES
        self.graph.free()  # one graph at a time
        self._used = self._model.plan_anew(self._arguments, self._index, samples=samples)
        self.graph = self._graph()

    def _graph(self) -> RecordedGraph:
        return self._model.graph(self._used.plan, self._arguments, self._index, self._head)
