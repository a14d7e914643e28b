"""Calls that are one forward job; `done_batch` is its backward half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradbox.computations import Forward
from gradbox.errors import GradboxError, InvalidInputs
from gradbox.inputs.shards import ShardGroup
from gradbox.protocol.options import Mode, options_of
from gradbox.remote.autograd import CallInputs, CallOutput, GradientJob
from gradbox.remote.calls import Call
from gradbox.remote.done_batch import (
    DoneBatch,
    Owner,
    Place,
    Placed,
    RemoteOptions,
    group_name,
    located,
    section,
    wrt_of,
)
from gradbox.results.result import GradResult

BARE = ""


class Runner(Owner, Protocol):
    """The remote model that the calls were made of, which runs its batches in order."""

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


class Batch:
    """A run of calls under one mode and the same weights."""

    def __init__(
        self,
        owner: Runner,
        *,
        mode: Mode,
        weights: Mapping[str, Any],
        leaves: Sequence[Tensor],  # those of the user's weights that require grad
        names: Sequence[str],
    ) -> None:
        self.mode = mode
        self.weights = weights
        self.calls: list[Call] = []
        self._owner = owner
        self._names = names
        self._leaves = leaves
        self._values: dict[Place, Tensor] = {}
        self._error: GradboxError | None = None
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
        placed = Placed.all_of(self.calls)
        leaves = [(call.index, name) for call in self.calls for name in call.leaves]
        options = self._owner.options
        given = options_of(options, RemoteOptions) | {
            "mode": self.mode,
            "transfer": options.transfer if weights else "exact",
            "wrt": wrt_of(options, placed, leaves),
            "retain": options.retain if any(call.recorded for call in self.calls) else 0,
        }
        computation = CallsForward(**given, weights=weights, calls=self.calls, returns=returns)
        try:
            result = self._owner.run_job(computation)
        except GradboxError as error:
            self._error, self._done = located(error, placed), True
            return None
        with torch.inference_mode(False), torch.enable_grad(), _without_saving_hooks():
            self._record(result, placed)
        # What was sent is on the box; a gradient job names it by the forward job alone.
        self.weights, self.calls = {}, []
        self._done = True
        return result

    def _record(self, result: GradResult, placed: Mapping[int, Placed]) -> None:
        done = DoneBatch(self._owner, job_id=result.manifest.job, calls=placed)
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
                place = (call.index, name)
                z = _output(result, placed, place).to(call.device)
                self._values[place] = (
                    CallOutput.apply(done, place, z, *tokens)  # type: ignore[no-untyped-call]
                    if call.recorded
                    else z
                )


def _output(result: GradResult, calls: Mapping[int, Placed], place: Place) -> Tensor:
    z: Tensor = result.outputs[section(calls, place)]
    rows = (result.manifest.rows or {})[group_name(calls[place[0]].position)]
    return z.reshape(()) if rows == [None] else z


def _without_saving_hooks() -> AbstractContextManager[Any]:
    """Leave the user's hooks to what the user's code saves: checkpointing counts its tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
