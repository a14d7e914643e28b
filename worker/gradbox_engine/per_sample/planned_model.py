"""A model, the plans that are kept of it, and what a job does with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.errors import NoBatchAxis
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.kernels import checkpoints_inlined
from gradbox_engine.per_sample.backward import RecordedGraph
from gradbox_engine.per_sample.planning.model import CALL_ERRORS, CallableModel, copied
from gradbox_engine.per_sample.planning.plan import Plan
from gradbox_engine.per_sample.planning.probe_runs import SAMPLES, plan_for

MOST_PLANS = 64  # of a model; a readout that a job brings makes a plan of its own

_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan]] = weakref.WeakKeyDictionary()

Head = Callable[..., Tensor]
"""(z, first=0) → what is differentiated, for z of a shard's samples from `first` on."""


@dataclass
class PlanInUse:
    """A plan, and what this job did with it."""

    plan: Plan
    made_on: int | None = None  # the shard on which this job made it; None: an earlier job did
    samples: int = SAMPLES  # of that shard in the probe runs
    checked: bool = False  # whether this process has compared rows of the job

    def state(self) -> dict[str, Any]:
        """Return what another process needs, to have the same plan."""
        return {
            "made_on": self.made_on,
            "samples": self.samples,
            "loops": self.plan.loops,
            "recorded": self.plan.recorded,
        }


class PlannedModel:
    """A model and the plans of one job, by the shapes of its shards."""

    def __init__(self, model: CallableModel) -> None:
        self.model = model
        self._in_use: dict[Any, PlanInUse] = {}

    def count(self, arguments: dict[str, Any], index: int) -> int:
        """Return how many samples a shard has."""
        samples = self.plan(arguments, index).plan.samples(arguments)
        if samples is None:
            raise NoBatchAxis(
                f"{self.model.where(index)}: expected a tensor that holds samples, got none"
            )
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
        return self._use(signature, PlanInUse(plan))

    def plan_anew(
        self, arguments: dict[str, Any], index: int, *, samples: int = SAMPLES
    ) -> PlanInUse:
        """Make a plan on this shard, in place of one that there may be."""
        where = self.model.where(index)
        with blaming("the model", where, model=self.model.model, arguments=arguments):
            plan = plan_for(self.model, arguments, index, samples=samples)
        signature = self.model.signature(arguments)
        plans = _plans.setdefault(self.model.model, {})
        plans.pop(signature, None)
        if plan.kept:
            plans[signature] = plan
        while len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
        return self._use(signature, PlanInUse(plan, index, samples))

    def graph(self, plan: Plan, arguments: dict[str, Any], index: int, head: Head) -> RecordedGraph:
        """Run a shard forward."""
        # Before the call and not after it: the graph may read what the call wrote.
        self.model.restore_buffers()
        self.model.begin_stream(index)
        where = self.model.where(index)
        with blaming("the model or the loss", where, model=self.model.model, arguments=arguments):
            return RecordedGraph(self.model, plan, copied(arguments), head)

    def called_alone(
        self,
        plan: Plan,
        arguments: dict[str, Any],
        index: int,
        sample: int,
        *,
        in_every_place: bool = False,
    ) -> Tensor | None:
        """Return z of one sample of a shard; None where the model takes no sample alone.

        Args:
            in_every_place: whether the shard keeps its shape, with this sample in all places.
        """
        alone = dict(arguments)
        for name, dim in plan.axes.items():
            value = arguments[name].narrow(dim, sample, 1)
            alone[name] = value.expand_as(arguments[name]) if in_every_place else value
        self.model.restore_buffers()
        self.model.begin_stream(index)
        try:
            with torch.enable_grad(), checkpoints_inlined():
                return self.model.call(copied(alone))
        except (*CALL_ERRORS, NoBatchAxis):
            return None

    def states(self) -> list[dict[str, Any]]:
        """Return each plan's `state`, by their first shards."""
        return [used.state() for used in self._in_use.values()]

    def resume(
        self,
        states: Sequence[Mapping[str, Any]],
        arguments: Callable[[int], dict[str, Any]],
    ) -> None:
        """Make the plans that another process had, on the same shards; none is confirmed.

        Args:
            states: what `states` returned there, after it had counted the same shards.
            arguments: returns those of a shard.
        """
        for used, found in zip(list(self._in_use.values()), states, strict=True):
            made_on, samples = found["made_on"], found["samples"]
            if made_on is not None and (made_on, samples) != (used.made_on, used.samples):
                used = self.plan_anew(arguments(made_on), made_on, samples=samples)
            if not found["recorded"]:
                used.plan.loop_over_all(found["loops"], "")
            used.plan.loops.update(found["loops"])

    def _use(self, signature: Any, used: PlanInUse) -> PlanInUse:
        self._in_use[signature] = used
        return used
