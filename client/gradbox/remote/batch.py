"""Calls that are one forward job, and whose backward pass is one gradient job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gradbox.computations import Cotangents, Forward, Gradient
from gradbox.errors import GradboxError
from gradbox.inputs.shards import ShardGroup
from gradbox.protocol.spec_fields import Transfer
from gradbox.remote.autograd import AccumulatedGrads, CallOutput, JobOutputs
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
        """Run the batches that wait, up to this one."""


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
        self._found: Mapping[str, Tensor] = {}
        self._done = False

    def value(self, place: Place) -> Tensor:
        """Return the output at `place`, running the job if it has not run.

        Raises:
            GradboxError: the job failed; a note says where in the user's code the call was made.
        """
        if not self._done:
            self._owner.run_until(self)
        if self._error is not None:
            raise self._error
        return self._values[place]

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
        with torch.inference_mode(False), torch.enable_grad():
            self._record(result)
        # What was sent is on the box; a gradient job names it by the forward job alone.
        self.weights = {}
        self._done = True
        return result

    def replay(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Run the gradient job; return the gradients of the inputs and keep the others."""
        given = dict(zip(self._places, cotangents, strict=True))
        reached = {index for (index, _), c in given.items() if c is not None}
        tensors = {
            self._section(place): c.reshape(1) if c.ndim == 0 else c
            for place, c in given.items()
            if c is not None
        }
        options = self._owner.job_options()
        computation = Gradient(
            loss=Cotangents(tensors, of=self._job_id),
            wrt=self._wrt([key for key in self._inputs if key[0] in reached]),
            transfer=self._owner.transfer(),
            **{field: options[field] for field in ("priority", "timeout_s", "devices", "name")},
        )
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            raise self._located(error) from None
        unreached = set(result.manifest.unreached)
        self._found = {n: g for n, g in result.grads.items() if n not in unreached}
        return [
            self._input_grad(result, key, leaf) if key[0] in reached else None
            for key, leaf in self._inputs.items()
        ]

    def accumulate(self) -> None:
        """Add the gradients of the last replay to the model's."""
        found, self._found = self._found, {}
        self._owner.add_grads(found)

    def _wrt(self, inputs: Sequence[Place]) -> list[str] | None:
        """Return what a job differentiates: the parameters that are wanted, and these inputs."""
        globs = self._owner.wrt_globs()
        if not inputs:
            return globs
        named = [f"inputs.{group_name(self._position[i])}.{name}" for i, name in inputs]
        return [*(globs or ["*"]), *named]

    def _record(self, result: GradResult) -> None:
        self._inputs = {
            (call.index, name): leaf for call in self.calls for name, leaf in call.leaves.items()
        }
        outputs = {
            (call.index, name): self._output(result, call, name)
            for call in self.calls
            for name in self._names
        }
        recorded = {call.index for call in self.calls if call.recorded}
        self._values = {place: z for place, z in outputs.items() if place[0] not in recorded}
        self._places = [place for place in outputs if place[0] in recorded]
        if self._places:
            token = AccumulatedGrads.apply(self._owner.anchor, self)  # type: ignore[no-untyped-call]
            zs = JobOutputs.apply(  # type: ignore[no-untyped-call]
                self, [outputs[p] for p in self._places], token, *self._inputs.values()
            )
            for place, z in zip(self._places, zs, strict=True):
                self._values[place] = CallOutput.apply(z)  # type: ignore[no-untyped-call]

    def _output(self, result: GradResult, call: Call, name: str) -> Tensor:
        z: Tensor = result.outputs[self._section((call.index, name))]
        rows = (result.manifest.rows or {})[group_name(self._position[call.index])]
        return (z.reshape(()) if rows == [None] else z).to(call.device)

    def _input_grad(self, result: GradResult, key: Place, leaf: Tensor) -> Tensor:
        index, name = key
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


def group_name(position: int) -> str:
    """Return how a job calls the call at `position`: equal calls make equal blobs in every job."""
    return f"z{position}"
