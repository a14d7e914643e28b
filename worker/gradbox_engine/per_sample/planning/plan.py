"""How each use of a parameter is treated: decided once for a model and the shapes of its inputs.

A plan is made from three probe runs on a few of the shard's samples: `SAMPLES`, `SAMPLES + EXTRA`,
and the latter with one sample replaced. The first two show which dim of every tensor holds the
samples, the third how a merged dim is ordered and whether any sample depends on another.

Where the third run has no other numbers to put in a sample's place, it shows neither: the plan is
compared on every shard and made anew by the next job.

What is multiplied by zero hides a dependence from the third run, so a plan is valid only while the
parameters and buffers that were all zero when it was made still are. A layer that mixes samples
shows in the third run all the same, at its own output: see `mixing_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.per_sample.planning.probed_use import LOOP, VMAP, ProbedUse, ProbeUses
from gradbox_engine.per_sample.recording.function_calls import Key
from gradbox_engine.per_sample.recording.steps import DerivedStep, Step, VmapStep

IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


@dataclass
class Plan:
    """What a run does at each use, and which parameters take one backward pass a sample.

    `loops` and `alone` change where a run shows that they do not hold; the last two fields are
    what runs found.
    """

    steps: list[Step] = field(default_factory=list)
    recorded: bool = True  # whether uses are recorded; not where all parameters are looped over
    routes: dict[str, set[str]] = field(default_factory=dict)  # parameter → routes of its uses
    loops: dict[str, str] = field(default_factory=dict)  # parameter → why it is looped over
    axes: Mapping[str, int] = field(default_factory=dict)  # argument → dim that counts samples
    one_sample: bool = False  # whether the shard is one sample, with no such dim
    rounding: torch.dtype = torch.float64  # the coarsest dtype of a tensor on the way
    zeros: frozenset[str] = frozenset()  # parameters and buffers all zero when it was made
    kept: bool = True  # whether later jobs use it: not where the probe runs had nothing to replace
    compares_always: bool = False  # whether rows are compared in whole on every shard, as data may
    # decide which samples go where or which are mixed, or refute a guess of where they are
    shares_numbers: bool = False  # whether data may decide a number that several samples get, see
    # `shared_numbers`: a row is then compared in every job
    alone: bool = True  # whether a sample's z is the same, but for rounding, without the others

    confirmed: dict[int, set[str]] = field(default_factory=dict)  # by `RecordedGraph.calls`, the
    # parameters whose rows were all compared at a gradient that is not zero
    batched_backward: bool | None = None  # whether all outputs' backward run as one; None: untried

    @property
    def is_shared(self) -> bool:
        """Whether other processes may use it, which find the functions in it by their names."""
        return self.kept and all(_of_torch(step.function) for step in self.steps)

    def samples(self, arguments: Mapping[str, Any]) -> int | None:
        """Return how many samples these arguments hold, None where no argument holds any."""
        if self.one_sample:
            return 1
        for name, dim in self.axes.items():
            size: int = arguments[name].shape[dim]
            return size
        return None

    @property
    def derived(self) -> set[int]:
        """The numbers of the uses that make tensors of parameters alone."""
        return {step.number for step in self.steps if isinstance(step, DerivedStep)}

    def loop(self, names: Iterable[str], why: str) -> None:
        """Have parameters take one backward pass a sample."""
        for name in names:
            self.loops.setdefault(name, why)

    def loop_where_vectorised(self, why: str) -> bool:
        """Have functions called as they are that are vectorised now; return whether some were.

        A batching rule of torch's that is wrong makes autograd's own gradient of that graph wrong.
        """
        found = [step for step in self.steps if isinstance(step, VmapStep)]
        names = [name for name, routes in self.routes.items() if VMAP in routes]
        self.steps = [
            Step(step.function, step.number, LOOP) if isinstance(step, VmapStep) else step
            for step in self.steps
        ]
        self.loop(names, why)
        return bool(found)

    def loop_over_all(self, parameters: Iterable[str], why: str) -> None:
        """Have all parameters take one backward pass a sample, and record no use."""
        self.steps.clear()
        self.recorded = False
        self.loop(parameters, why)


def _of_torch(function: Callable[..., Any]) -> bool:
    if isinstance(function, FunctionType):
        return function.__module__.partition(".")[0] == "torch"
    return isinstance(function, IN_C)  # the methods of tensors among them


def make_plan(probes: ProbeUses, parameters: Mapping[str, Tensor]) -> Plan:
    """Decide on a route for every use of a parameter."""
    plan = Plan()
    if not probes.alike:
        plan.loop_over_all(parameters, "the model's calls depend on how many samples it is given")
        return plan
    parents: dict[Key, frozenset[str]] = {name: frozenset([name]) for name in parameters}
    for number in range(len(probes.first)):
        use = ProbedUse(probes, number, parents)
        if not use.real:
            continue
        step = use.step()
        plan.compares_always = plan.compares_always or use.guesses
        names = frozenset().union(*(parents[key] for key in use.real))
        if isinstance(step, DerivedStep):
            for position in range(len(use.first.outputs)):
                parents[number, position] = names
        elif step.route == LOOP:
            plan.loop(names, use.why_looped)
        plan.steps.append(step)
        for name in names:
            plan.routes.setdefault(name, set()).add(step.route)
    return plan
