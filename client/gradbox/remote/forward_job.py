"""Calls that are one forward job, and the gradient jobs at cotangents of its outputs.

A `RemoteForward` collects calls and runs the forward job; a `DoneRemoteForward` is its backward
half. The nodes of the graph hold that, and it holds no output: a tensor that its own graph held
would never be freed, for Python does not see that ring through autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from gradbox.computations import Cotangents, Forward, Gradient
from gradbox.computations.computation import Weights, globs
from gradbox.errors import GradboxError, InvalidInputs
from gradbox.inputs.shards import ShardGroup
from gradbox.protocol import GradientOptions, RunOptions, options_of
from gradbox.protocol.options import Mode
from gradbox.remote.autograd import CallInputs, CallOutput, GradientJob
from gradbox.remote.calls import Call
from gradbox.results.result import GradResult

Slot = tuple[int, str]
"""A call's index, and the name of one of its inputs or outputs; "" is the only output."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(GradientOptions):
    """What all jobs of a remote model are given alike; see `gradbox.computations`."""

    model: str  # NAME@VERSION
    readout: Callable[..., Any] | None = None
    wrt: str | Sequence[str] | None = None


class Owner(Protocol):
    """The remote model that the calls were made of."""

    anchor: Tensor
    options: RemoteOptions

    def run_job(self, computation: Forward | Gradient) -> GradResult:
        """Run a job."""

    def add_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Add to the model's gradients."""


@dataclass(frozen=True)
class CallFacts:
    """What is known of a call besides its tensors.

    Attributes:
        position: which of the job's groups it is.
        leaves: its inputs that require grad: where their gradients go, in which dtype.
    """

    position: int
    leaves: Mapping[str, tuple[torch.device, torch.dtype]]
    where: str

    @classmethod
    def all_of(cls, calls: Sequence[Call]) -> dict[int, CallFacts]:
        """Return it of a job's calls, by their index."""
        return {
            call.index: cls(
                position, {n: (x.device, x.dtype) for n, x in call.leaves.items()}, call.where
            )
            for position, call in enumerate(calls)
        }


@dataclass
class BackwardPass:
    """What one backward pass has found of a job: cotangents, and what came of those before."""

    cotangents: dict[Slot, Tensor] = field(default_factory=dict)
    input_grads: dict[Slot, Tensor] = field(default_factory=dict)
    grads: list[Mapping[str, Tensor]] = field(default_factory=list)


class DoneRemoteForward:
    """A forward job that is done, and the gradient jobs at cotangents of its outputs."""

    def __init__(self, owner: Owner, *, result: GradResult, calls: Mapping[int, CallFacts]) -> None:
        self._owner = owner
        # Its tensors have no graph. A job of this process is kept for as long as its result lives.
        self._result = result
        self._job_id = result.manifest.job
        self._calls = calls
        self._passes: dict[int, BackwardPass] = {}

    def note(self, slot: Slot, cotangent: Tensor) -> None:
        """Remember a cotangent of the backward pass that runs."""
        self._backward_pass().cotangents[slot] = cotangent

    def input_grads(self, call: int) -> list[Tensor | None]:
        """Return the gradients of a call's inputs, by a gradient job where none has run for it."""
        found = self._backward_pass()
        if any(index == call for index, _ in found.cotangents):
            self._run_gradient(found)
        return [found.input_grads.pop((call, name), None) for name in self._calls[call].leaves]

    def accumulate(self) -> None:
        """Add the gradients of this pass to the model's."""
        found = self._backward_pass()
        if found.cotangents:
            self._run_gradient(found)
        for grads in found.grads:
            self._owner.add_grads(grads)

    def _backward_pass(self) -> BackwardPass:
        """Return what belongs to the backward pass that runs; several threads may have one each."""
        current = torch._C._current_graph_task_id()
        if current not in self._passes:
            self._passes[current] = BackwardPass()
            at_its_end = partial(self._passes.__delitem__, current)
            Variable._execution_engine.queue_callback(at_its_end)
        return self._passes[current]

    def _run_gradient(self, found: BackwardPass) -> None:
        """Run the gradient job at the cotangents so far."""
        # One by one: on several devices another thread may note one meanwhile.
        given = {slot: found.cotangents.pop(slot) for slot in [*found.cotangents]}
        calls = dict.fromkeys(index for index, _ in given)
        inputs = [(index, name) for index in calls for name in self._calls[index].leaves]
        options = self._owner.options
        computation = Gradient(
            loss=Cotangents(
                {
                    section(self._calls, slot): c.reshape(1) if c.ndim == 0 else c
                    for slot, c in given.items()
                },
                of=self._job_id,
            ),
            wrt=wrt_of(options, self._calls, inputs),
            **options_of(options, RunOptions),
        )
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            raise located(error, self._calls) from None
        unreached = set(result.manifest.unreached)
        found.grads.append({n: g for n, g in result.grads.items() if n not in unreached})
        for key in inputs:
            grad, before = self._input_grad(result, key), found.input_grads.get(key)
            found.input_grads[key] = grad if before is None else before + grad

    def _input_grad(self, result: GradResult, key: Slot) -> Tensor:
        index, name = key
        call = self._calls[index]
        found: Tensor = result.input_grads[f"{group_name(call.position)}/0/{name}"]
        return found.to(*call.leaves[name])


def wrt_of(
    options: RemoteOptions, calls: Mapping[int, CallFacts], inputs: Sequence[Slot]
) -> list[str] | None:
    """Return what a job differentiates: the parameters that are wanted, and these inputs."""
    names = globs(options.wrt)
    if not inputs:
        return names
    named = [f"inputs.{group_name(calls[index].position)}.{name}" for index, name in inputs]
    return [*(names or ["*"]), *named]


def section(calls: Mapping[int, CallFacts], slot: Slot) -> str:
    """Return how a job's result calls an output."""
    index, name = slot
    group = group_name(calls[index].position)
    return f"{group}/{name}" if name else group


def group_name(position: int) -> str:
    """Return how a job calls the call at `position`: equal calls make equal blobs in every job."""
    return f"z{position}"


def located(error: GradboxError, calls: Mapping[int, CallFacts]) -> GradboxError:
    """Say at which line the call was made that the box refused."""
    lines = [call.where for call in calls.values()]
    for position, where in enumerate(lines):
        if f"group {group_name(position)!r}" in str(error):
            error.add_note(f"{group_name(position)!r} is the call at {where}")
            return error
    error.add_note(f"one of {len(lines)} calls, the first at {lines[0]}, the last at {lines[-1]}")
    return error


BARE = ""


class Runner(Owner, Protocol):
    """The remote model that the calls were made of, which runs its forward jobs in order."""

    def run_until(self, forward: RemoteForward) -> None:
        """Run the forward jobs that wait, up to this one; raises what the first failed with."""

    def done_forward(self, result: GradResult, calls: Mapping[int, CallFacts]) -> DoneRemoteForward:
        """Return the backward half of a forward job that is done."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CallsForward(Forward):
    """A forward job whose shards are calls, each a group of its own under its own stream."""

    calls: Sequence[Call]
    inputs: Any = None

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        return tuple(
            ShardGroup(
                name=group_name(position),
                shards=(call.arguments,),
                method=call.method,
                streams=((0, call.index),),
            )
            for position, call in enumerate(self.calls)
        )


class RemoteForward:
    """A run of calls under one mode and the same weights."""

    def __init__(
        self,
        owner: Runner,
        *,
        mode: Mode,
        weights: Any,  # as a `Forward` takes them
        leaves: Sequence[Tensor],  # those of the user's weights that require grad
        names: Sequence[str],
    ) -> None:
        self.mode = mode
        self.weights = weights
        self.calls: list[Call] = []
        self._owner = owner
        self._names = names
        self._leaves = leaves
        self._values: dict[Slot, Tensor] = {}
        self._error: GradboxError | None = None
        self._done = False

    def value(self, slot: Slot) -> Tensor:
        """Return the output at `slot`, running the job if it has not run.

        Raises:
            GradboxError: the job failed; a note says where in the user's code the call was made.
            InvalidInputs: the job has not run, and now would under one of torch.func's transforms.
        """
        if not self._done:
            if torch._C._are_functorch_transforms_active():
                raise InvalidInputs(
                    "expected the outputs of a remote model to be used first outside torch.func's "
                    "transforms, got one in a function under vmap, grad, vjp or the like: write "
                    "z = z.clone() before"
                )
            self._owner.run_until(self)
        self.check()
        return self._values[slot]

    def check(self) -> None:
        """Raise what the job failed with, if it did."""
        if self._error is not None:
            raise self._error

    def run(self, weights: Weights, *, returns: Sequence[Any]) -> GradResult | None:
        """Run the forward job and build the graph; return its result, or None if it failed.

        Args:
            weights: those of the calls as they are sent, and buffers as the jobs before left
                them.
        """
        facts = CallFacts.all_of(self.calls)
        leaves = [(call.index, name) for call in self.calls for name in call.leaves]
        options = self._owner.options
        given = options_of(options, RemoteOptions) | {
            "mode": self.mode,
            "transfer": options.transfer if weights else "exact",
            "wrt": wrt_of(options, facts, leaves),
            "retain": options.retain if any(call.recorded for call in self.calls) else 0,
        }
        computation = CallsForward(**given, weights=weights, calls=self.calls, returns=returns)
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            self._error, self._done = located(error, facts), True
            return None
        with torch.inference_mode(False), torch.enable_grad(), _without_saving_hooks():
            self._record(result, facts)
        # What was sent is on the box; a gradient job names it by the forward job alone.
        self.weights, self.calls = {}, []
        self._done = True
        return result

    def _record(self, result: GradResult, facts: Mapping[int, CallFacts]) -> None:
        done = self._owner.done_forward(result, facts)
        # Made before all outputs, so that autograd runs them after those, see `autograd`.
        of_job = GradientJob.apply(self._owner.anchor, done, *self._leaves)  # type: ignore[no-untyped-call]
        of_inputs = {
            call.index: CallInputs.apply(done, call.index, *call.leaves.values())  # type: ignore[no-untyped-call]
            for call in self.calls
            if call.leaves
        }
        for call in self.calls:
            tokens = [of_job, *([of_inputs[call.index]] if call.leaves else [])]
            for name in self._names:
                slot = (call.index, name)
                z = _output(result, facts, slot).to(call.device)
                self._values[slot] = (
                    CallOutput.apply(done, slot, z, *tokens)  # type: ignore[no-untyped-call]
                    if call.recorded
                    else z
                )


def _output(result: GradResult, calls: Mapping[int, CallFacts], slot: Slot) -> Tensor:
    z: Tensor = result.outputs[section(calls, slot)]
    rows = (result.manifest.rows or {})[group_name(calls[slot[0]].position)]
    return z.reshape(()) if rows == [None] else z


def _without_saving_hooks() -> AbstractContextManager[Any]:
    """Leave the user's hooks to what the user's code saves: checkpointing counts its tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class RemoteOutput(torch.Tensor):
    """z of one call. Any use of it, its shape too, waits for the job that computes it.

    It stands for an ordinary tensor with a `grad_fn`, and what is computed from it is ordinary.
    """

    _forward: RemoteForward
    _slot: tuple[int, str]

    @staticmethod
    def standing_for(
        forward: RemoteForward, slot: tuple[int, str], *, holder: torch.Tensor
    ) -> RemoteOutput:
        """Return a stand-in.

        Args:
            slot: the call's index, and the name of the output or "".
            holder: what code sees that looks past torch's functions.
        """
        output = holder.as_subclass(RemoteOutput)
        output._forward, output._slot = forward, slot
        return output

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_fetched(args), **_fetched(dict(kwargs or {})))


def _fetched(value: Any) -> Any:
    """Put the tensors themselves in place of their stand-ins, in nested arguments too."""
    if isinstance(value, RemoteOutput):
        with torch._C.DisableTorchFunctionSubclass():
            forward, slot = value._forward, value._slot
        return forward.value(slot)
    if isinstance(value, dict):
        return {key: _fetched(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named one
        return value._make(_fetched(item) for item in value)
    if type(value) in (list, tuple):
        return type(value)(_fetched(item) for item in value)
    return value
