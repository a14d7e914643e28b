"""The model at a run's weights as a callable: any loss, and gradients that stay on the box.

It is a `RemoteModel` whose backward pass runs no job. The cotangents of its outputs are kept with
the run until `run.apply()` posts them as a step, whose gradients the box's optimizer takes.

    calls ──→ Forward at state n - 1, with the seed of step n ──→ z ──→ a loss, anywhere
    run.apply() ──→ step n at ∂loss/∂z ←── loss.backward()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, cast

from torch import Tensor

from gradbox.computations import Forward, Gradient
from gradbox.computations.computation import OfARun
from gradbox.errors import InvalidInputs
from gradbox.protocol import ModelView, RunView, step_seed
from gradbox.remote import RemoteModel, RemoteOptions
from gradbox.remote.forward_job import CallFacts, DoneRemoteForward, RemoteForward, section
from gradbox.remote.model import Client
from gradbox.results.result import GradResult


class Trained(Protocol):
    """The run whose weights the calls see."""

    @property
    def view(self) -> RunView:
        """What is known of it."""

    def at(self, step: int) -> OfARun:
        """Return the state after a step."""

    def hold(self, job_id: str, cotangents: Mapping[str, Tensor]) -> None:
        """Keep cotangents of a forward job for the next step."""

    def release(self) -> None:
        """Forget them."""


class CotangentsOfStep(DoneRemoteForward):
    """A forward job that is done, whose cotangents are kept for a step."""

    def __init__(
        self, owner: RunModel, *, result: GradResult, calls: Mapping[int, CallFacts]
    ) -> None:
        super().__init__(owner, result=result, calls=calls)
        self._run = owner.run

    def input_grads(self, call: int) -> NoReturn:
        raise InvalidInputs(
            f"expected inputs without gradients where a run is trained, got some that require grad "
            f"in the call at {self._calls[call].where}: the gradients of a step stay on the box; "
            f"pass x.detach(), or compute those of inputs by client.model(...)"
        )

    def accumulate(self) -> None:
        """Hand the cotangents of this pass to the run."""
        noted = self._backward_pass().cotangents
        # One by one: on several devices another thread may note one meanwhile.
        given = {slot: noted.pop(slot) for slot in [*noted]}
        named = {
            section(self._calls, slot): c.reshape(1) if c.ndim == 0 else c
            for slot, c in given.items()
        }
        self._run.hold(self._job_id, named)


class RunModel(RemoteModel):
    """The model at a run's weights; `TrainRun.model` makes one.

    Call i since the last step, counted from 0, runs under the stream (seed, 0, i) of the seed
    `step_seed(run.seed, n)`, n being the step that comes. Calls see the weights and buffers after
    the last step that was made here. `zero_grad` forgets a backward pass that is not applied.
    """

    def __init__(
        self,
        client: Client,
        view: ModelView,
        *,
        run: Trained,
        options: Mapping[str, Any],
        progress: bool | None,
    ) -> None:
        seen = run.view
        of_run = {"wrt": seen.wrt, "precision": seen.precision, "transfer": "exact"}
        of_run["model"] = f"{seen.model}@{seen.model_version}"
        given = RemoteOptions(**{"mode": seen.mode, **options, **of_run})
        super().__init__(client, view, weights=None, options=given, progress=progress)
        self.run = run
        self._step = seen.num_steps
        self._state = run.at(self._step)

    @property
    def grads(self) -> NoReturn:
        raise InvalidInputs("f.grads: gradients of a run stay on the box: run.apply() takes them")

    @property
    def buffers(self) -> NoReturn:
        raise InvalidInputs("f.buffers: they are the run's: run.weights() has them after a step")

    def zero_grad(self) -> None:
        """Forget the backward passes since the last step."""
        self.run.release()

    def run_job(self, computation: Forward | Gradient) -> GradResult:
        """Run a forward job under the seed of the step that follows its state."""
        state = cast("OfARun", computation.weights).state_ref
        seed = step_seed(self.run.view.seed, (state.step or 0) + 1)
        return super().run_job(replace(computation, seed=seed))

    def done_forward(self, result: GradResult, calls: Mapping[int, CallFacts]) -> DoneRemoteForward:
        """Return the backward half of a forward job that is done."""
        return CotangentsOfStep(self, result=result, calls=calls)

    def _run(self, forward: RemoteForward) -> None:
        # The step takes the buffers out of the forward job's result.
        returns = ("outputs", "buffers") if self._view.buffers else ("outputs",)
        forward.run(forward.weights, returns=returns)

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            if self.run.view.num_steps != self._step:
                self._step = self.run.view.num_steps
                self._state = self.run.at(self._step)
                self._num_calls = 0
            return super()._call(method, args, kwargs)

    def _are_newest(self, weights: Any) -> bool:
        return weights is self._state

    def _newest_weights(self) -> tuple[Any, Sequence[Any]]:
        return self._state, ()
