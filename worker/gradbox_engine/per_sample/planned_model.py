"""A model, the plans that are kept of it, and what a job does with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradbox_engine.errors import BadOutput, ModelCallFailed, NoBatchAxis
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.per_sample.backward import Head, RecordedGraph
from gradbox_engine.per_sample.planning.model import CallableModel, Shapes, shapes_of
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.planning.probe_runs import SAMPLES, plan_for

Plans = Mapping[Shapes, Plan]
"""Plans of one job for shards of these shapes."""

MOST_PLANS = 64  # of a model; a readout that a job brings makes a plan of its own
ALWAYS_COMPARED = 64  # samples from which on every job compares a row

_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()


def forget_plans(model: nn.Module) -> None:
    """Make plans anew: the model is not what it was when jobs made them."""
    _plans.pop(model, None)


@dataclass
class PlanInUse:
    """A plan, and what this job did with it."""

    plan: Plan
    made_on: Position | None = None  # the shard on which this job made it; None: an earlier one
    samples: int = SAMPLES  # of that shard in the probe runs
    first: bool = True  # whether this process has run no shard of the job by it

    def state(self) -> dict[str, Any]:
        """Return what another process needs, to have the same plan."""
        return {
            "made_on": self.made_on,
            "samples": self.samples,
            "loops": self.plan.loops,
            "recorded": self.plan.recorded,
        }


class PlannedModel:
    """A model and the plans of one job, by the shapes of its shards.

    Args:
        check_number: from 0 to 1, see `row_is_due`.
    """

    def __init__(self, model: CallableModel, check_number: float = 0.0) -> None:
        self.model = model
        self._check_number, self._row_was_due = check_number, False
        self._in_use: dict[Any, PlanInUse] = {}

    def count(self, position: Position) -> int:
        """Return how many samples a shard has."""
        samples = self.plan(position).plan.samples(self.model.form(position))
        if samples is None:
            raise NoBatchAxis(
                f"{self.model.where(position)}: expected a tensor that holds samples, got none"
            )
        return samples

    def row_is_due(self, num_samples: int) -> bool:
        """Return whether a row is to be compared on the next shard, by the number of samples.

        That is so once in a job, and in as many of a hundred jobs as the comparison's cost asks
        for: with probability num_samples / 64 where the job's number is a random one.
        """
        due = not self._row_was_due and self._check_number < num_samples / ALWAYS_COMPARED
        self._row_was_due |= due
        return due

    def plan(self, position: Position) -> PlanInUse:
        """Return the plan for a shard's shapes, made if no job has."""
        signature = self._signature(position)
        used = self._in_use.get(signature)
        if used is not None:
            return used
        plan = _plans.get(self.model.model, {}).get(signature)
        if plan is None or not self.model.all_zero(plan.zeros):
            return self.plan_anew(position)
        return self._use(signature, PlanInUse(plan))

    def plan_anew(self, position: Position, *, samples: int = SAMPLES) -> PlanInUse:
        """Make a plan on this shard, in place of one that there may be."""
        with blaming("the model", self.model.where(position), model=self.model.model):
            plan = plan_for(self.model, position, samples=samples)
        signature = self._signature(position)
        plans = _plans.setdefault(self.model.model, {})
        plans.pop(signature, None)
        if plan.kept:
            plans[signature] = plan
            _drop_oldest(plans)
        return self._use(signature, PlanInUse(plan, position, samples))

    def for_others(self, positions: Iterable[Position]) -> Plans:
        """Return plans for the shapes of some shards, if other processes can use them."""
        found = {
            shapes_of(self.model.form(position)): self.plan(position).plan for position in positions
        }
        return {shapes: plan for shapes, plan in found.items() if plan.is_shared}

    def learn(self, group: int, plans: Plans) -> None:
        """Take other processes' plans for a group's shards, where this one has none.

        What they have found by them is left out: rows are compared here as by a new plan.
        """
        known = _plans.setdefault(self.model.model, {})
        for shapes, plan in plans.items():
            new = replace(plan, confirmed={}, batched_backward=None)
            known.setdefault(self.model.signature(group, shapes), new)
        _drop_oldest(known)

    def graph(self, plan: Plan, position: Position, head: Head) -> RecordedGraph:
        """Run a shard forward."""
        alone = None
        if plan.alone and not plan.one_sample and self.model.recomputes(position):
            alone = partial(self.called_alone, plan, position)
        return RecordedGraph(self.model, plan, position, head, alone=alone)

    def called_alone(self, plan: Plan, position: Position, sample: int) -> Tensor | None:
        """Return z of one sample of a shard; None where the model takes no sample alone."""
        alone = dict(self.model.shard(position))
        for name, dim in plan.axes.items():
            alone[name] = alone[name].narrow(dim, sample, 1)
        self.model.restore_buffers()
        try:
            return self.model.call(position, self.model.feed.copied(alone))
        except (ModelCallFailed, BadOutput, NoBatchAxis):
            return None

    def states(self) -> list[dict[str, Any]]:
        """Return each plan's `state`, by their first shards."""
        return [used.state() for used in self._in_use.values()]

    def resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Make the plans that another process had, on the same shards; none is confirmed.

        Args:
            states: what `states` returned there, after it had counted the same shards.
        """
        if len(self._in_use) != len(states):  # for one of the two had to recompute shards
            return
        for used, found in zip(list(self._in_use.values()), states, strict=True):
            samples = found["samples"]
            made_on = None if found["made_on"] is None else Position(*found["made_on"])
            if made_on is not None and (made_on, samples) != (used.made_on, used.samples):
                used = self.plan_anew(made_on, samples=samples)
            if not found["recorded"]:
                used.plan.loop_over_all(found["loops"], "")
            used.plan.loops.update(found["loops"])

    def _signature(self, position: Position) -> tuple[Any, ...]:
        signature = self.model.signature(position.group, shapes_of(self.model.form(position)))
        return (*signature, "recomputed") if self.model.recomputes(position) else signature

    def _use(self, signature: Any, used: PlanInUse) -> PlanInUse:
        self._in_use[signature] = used
        return used


def _drop_oldest(plans: dict[Any, Plan]) -> None:
    while len(plans) > MOST_PLANS:
        del plans[next(iter(plans))]
