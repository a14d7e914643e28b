"""Calls that are one forward job, and whose backward pass is one gradient job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from gradbox.computations import Cotangents, Forward, Gradient
from gradbox.errors import GradboxError, InvalidInputs
from gradbox.inputs.shards import ShardGroup
from gradbox.protocol.spec_fields import Transfer
from gradbox.remote.autograd import CallInputs, CallOutput, GradientJob
from gradbox.remote.calls import Call
from gradbox.results.result import GradResult

BARE = ""

Place = tuple[int, str]
"""A call's index, and the name of one of its outputs or BARE."""


class Owner(Protocol):
    """The remote model that the calls were made of."""

    anchor: Tensor

    def job_options(self) -> Mapping[str, Any]:
        """Return what every forward job is told, beside calls, mode and weights."""

    def run_job(self, computation: Forward | Gradient) -> GradResult:
        """Run a job."""

    def wrt_globs(self) -> list[str] | None:
        """Return the globs over parameters whose gradients are wanted."""

    def transfer(self) -> Transfer:
        """Return the format of gradients on the wire, and of weights where there are some."""

    def retain_budget(self) -> int | Literal["auto"]:
        """Return the bytes for graphs that a forward job keeps for its gradient job."""

    def add_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Add to the model's gradients."""

    def run_until(self, batch: Batch) -> None:
        """Run the batches that wait, up to this one; raises what the first failed with."""


@dataclass(frozen=True, kw_only=True, eq=False)
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


@dataclass
class BackwardPass:
    """What one backward pass has found of a job: cotangents, and what came of those before."""

    cotangents: dict[Place, Tensor] = field(default_factory=dict)
    input_grads: dict[Place, Tensor] = field(default_factory=dict)
    grads: list[Mapping[str, Tensor]] = field(default_factory=list)


class Batch:
    """A run of calls under one mode and the same weights."""

    def __init__(
        self, owner: Owner, *, mode: str, weights: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        self.mode = mode
        self.weights = weights
        self.calls: list[Call] = []
        self._owner = owner
        self._names = names
        self._values: dict[Place, Tensor] = {}
        self._error: GradboxError | None = None
        self._passes: dict[int, BackwardPass] = {}
        self._done = False

    def value(self, place: Place) -> Tensor:
        """Return the output at `place`, running the job if it has not run.

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
        return self._values[place]

    def check(self) -> None:
        """Raise what the job failed with, if it did."""
        if self._error is not None:
            raise self._error

    def run(self, weights: Mapping[str, Any], *, returns: Sequence[Any]) -> GradResult | None:
        """Run the forward job and build the graph; return its result, or None if it failed.

        Args:
            weights: those of the batch as they are sent, and buffers as the batches before left
                them.
        """
        self._position = {call.index: position for position, call in enumerate(self.calls)}
        computation = CallsForward(
            **self._owner.job_options(),
            mode=self.mode,  # type: ignore[arg-type]  # one of the two that it was given
            weights=weights,
            transfer=self._owner.transfer() if weights else "exact",
            calls=self.calls,
            returns=returns,
            wrt=self._wrt([(call.index, name) for call in self.calls for name in call.leaves]),
            retain=self._owner.retain_budget() if any(call.recorded for call in self.calls) else 0,
        )
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            self._error, self._done = self._located(error), True
            return None
        self._job_id = result.manifest.job
        with torch.inference_mode(False), torch.enable_grad(), _without_saving_hooks():
            self._record(result)
        # What was sent is on the box; a gradient job names it by the forward job alone.
        self.weights = {}
        self._done = True
        return result

    def note(self, place: Place, cotangent: Tensor) -> None:
        """Remember a cotangent of the backward pass that runs."""
        self._backward_pass().cotangents[place] = cotangent

    def input_grads(self, call: int) -> list[Tensor | None]:
        """Return the gradients of a call's inputs, by a gradient job where none has run for it."""
        found = self._backward_pass()
        if any(index == call for index, _ in found.cotangents):
            self._run_gradient(found)
        return [found.input_grads.pop((call, name), None) for name in self._leaves(call)]

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
        given, found.cotangents = found.cotangents, {}
        calls = dict.fromkeys(index for index, _ in given)
        reached = [(index, name) for index in calls for name in self._leaves(index)]
        options = self._owner.job_options()
        computation = Gradient(
            loss=Cotangents(
                {
                    self._section(place): c.reshape(1) if c.ndim == 0 else c
                    for place, c in given.items()
                },
                of=self._job_id,
            ),
            wrt=self._wrt(reached),
            transfer=self._owner.transfer(),
            **{field: options[field] for field in ("priority", "timeout_s", "devices", "name")},
        )
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            raise self._located(error) from None
        unreached = set(result.manifest.unreached)
        found.grads.append({n: g for n, g in result.grads.items() if n not in unreached})
        for key in reached:
            grad, before = self._input_grad(result, key), found.input_grads.get(key)
            found.input_grads[key] = grad if before is None else before + grad

    def _leaves(self, call: int) -> Mapping[str, Tensor]:
        """Return a call's inputs that require grad."""
        return self.calls[self._position[call]].leaves

    def _wrt(self, inputs: Sequence[Place]) -> list[str] | None:
        """Return what a job differentiates: the parameters that are wanted, and these inputs."""
        globs = self._owner.wrt_globs()
        if not inputs:
            return globs
        named = [f"inputs.{group_name(self._position[i])}.{name}" for i, name in inputs]
        return [*(globs or ["*"]), *named]

    def _record(self, result: GradResult) -> None:
        # Made before all outputs, so that autograd runs them after those, see `autograd`.
        of_job = GradientJob.apply(self._owner.anchor, self)  # type: ignore[no-untyped-call]
        of_inputs = {
            call.index: CallInputs.apply(self, call.index, *call.leaves.values())  # type: ignore[no-untyped-call]
            for call in self.calls
            if call.leaves
        }
        for call in self.calls:
            tokens = [of_job, *([of_inputs[call.index]] if call.leaves else [])]
            for name in self._names:
                z, place = self._output(result, call, name), (call.index, name)
                self._values[place] = (
                    CallOutput.apply(self, place, z, *tokens)  # type: ignore[no-untyped-call]
                    if call.recorded
                    else z
                )

    def _output(self, result: GradResult, call: Call, name: str) -> Tensor:
        z: Tensor = result.outputs[self._section((call.index, name))]
        rows = (result.manifest.rows or {})[group_name(self._position[call.index])]
        return (z.reshape(()) if rows == [None] else z).to(call.device)

    def _input_grad(self, result: GradResult, key: Place) -> Tensor:
        index, name = key
        leaf = self._leaves(index)[name]
        found: Tensor = result.input_grads[f"{group_name(self._position[index])}/0/{name}"]
        return found.to(leaf.device, leaf.dtype)

    def _section(self, place: Place) -> str:
        index, name = place
        group = group_name(self._position[index])
        return f"{group}/{name}" if name else group

    def _located(self, error: GradboxError) -> GradboxError:
        """Say at which line the call was made that the box refused."""
        for position, call in enumerate(self.calls):
            if f"group {group_name(position)!r}" in str(error):
                error.add_note(f"{group_name(position)!r} is the call at {call.where}")
                return error
        first, last = self.calls[0].where, self.calls[-1].where
        error.add_note(f"one of {len(self.calls)} calls, the first at {first}, the last at {last}")
        return error


def _without_saving_hooks() -> AbstractContextManager[Any]:
    """Leave the user's hooks to what the user's code saves: checkpointing counts its tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def group_name(position: int) -> str:
    """Return how a job calls the call at `position`: equal calls make equal blobs in every job."""
    return f"z{position}"
