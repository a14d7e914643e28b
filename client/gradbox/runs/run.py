"""A run: training on the box, seen from here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

from gradbox.computations.computation import Computation, checked
from gradbox.computations.gradient import Cotangents, Loss
from gradbox.errors import GradboxError, InvalidJob, ServiceUnavailable
from gradbox.html import Listed
from gradbox.http.connection import Connection
from gradbox.http.paths import model_path, run_path, state_path
from gradbox.http.posting import ACCEPT, Answered, read_answer
from gradbox.job import QUICK_S, Job
from gradbox.printable import printable
from gradbox.progress import StepsLine
from gradbox.protocol import (
    History,
    JobState,
    ModelKeywords,
    ModelView,
    RunKeywords,
    RunView,
    SaveOrder,
    StateRef,
    StepView,
)
from gradbox.results.result import GradResult, Tensors
from gradbox.runs.optimizer import plain
from gradbox.runs.step import (
    Rates,
    StepGradient,
    StepKeywords,
    TrainStep,
)
from gradbox.submitting import Submitter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradbox.estimate import Estimate
    from gradbox.runs.model import RunModel
    from gradbox.runs.plot import Curve

# As many steps as a box tells of in one answer.
STEPS_LISTED: Final = 1000
JSON: Final = "application/json"


@dataclass(frozen=True)
class RunClient:
    """What a run needs of the client that it belongs to."""

    connection: Connection
    submitter: Submitter
    handle: Callable[[Answered], Job]

    @property
    def url(self) -> str:
        return self.connection.url

    def post(self, computation: Computation, *, progress: bool | None) -> Job:
        """Post a job, and wait a moment for its end."""
        return self.handle(self.submitter.submit(computation, progress=progress, wait_s=QUICK_S))

    def run(self, computation: Computation, *, progress: bool | None) -> GradResult:
        """Submit a job, wait for it and return its result."""
        return self.post(computation, progress=progress).result(progress=progress)

    def ask(self, method: str, path: str, body: bytes | None = None) -> Job:
        """Send a request that a job answers, and wait a moment for its end."""
        headers = {"Accept": ACCEPT} | ({} if body is None else {"Content-Type": JSON})
        content = None if body is None else lambda: [body]
        send = partial(self.connection.request, headers=headers, wait_s=QUICK_S)
        return self.handle(read_answer(send(method, path, body=content)))

    def weights(self, state: StateRef, *, progress: bool | None) -> dict[str, Any]:
        """Fetch the weights and buffers of a state."""
        result = self.ask("GET", state_path(state)).result(progress=progress)
        return {**Tensors(result._file, "weights"), **result.buffers}


class RunState:
    """The weights and buffers of a run after one of its steps, or as they were saved.

    Every computation takes it as `weights`, and `client.train` as `start` and `start_weights`.
    """

    def __init__(self, client: RunClient, state_ref: StateRef) -> None:
        self.state_ref = state_ref
        self._client = client

    def __repr__(self) -> str:
        named = self.state_ref.model_dump(exclude_none=True)
        return f"RunState({', '.join(f'{name}={value!r}' for name, value in named.items())})"

    def weights(self, *, progress: bool | None = None) -> dict[str, Any]:
        """Fetch what the run trains at this state, and the buffers; see `TrainRun.weights`.

        Raises:
            RunNotFound: the box has no such state any more.
        """
        return self._client.weights(self.state_ref, progress=progress)


class TrainRun:
    """Training on the box: weights, an optimizer's state, and how many steps were made.

        run = client.train("minilm", optimizer=Optimizer("adamw", lr=2e-5), wrt="encoder.layer.5.*")
        for shards, labels in loader:
            step = run.step(inputs=shards, loss=info_nce, loss_inputs={"labels": labels})
            print(step.number, step.loss, step.grad_norm)

    It goes on in another process by `client.find_run(id)`. Every computation takes it as `weights`.

    Steps are numbered, and a number is one step: a call that is repeated after its answer was lost
    gives the step that the box has made. Where another client made it with other content,
    `RunConflict` says so; `refresh` then looks where the run is.
    """

    def __init__(self, client: RunClient, view: RunView) -> None:
        self._client = client
        self._view = view
        self._lock = threading.RLock()  # over the number of the next step
        self._line: StepsLine | None = None
        self._held: tuple[str, dict[str, Any]] | None = None  # a forward job, and its cotangents

    def __repr__(self) -> str:
        name = f" {printable(self._view.name)!r}" if self._view.name else ""
        return f"<TrainRun {self.id}{name} after step {self.num_steps} at {self._client.url}>"

    def _repr_html_(self) -> str:
        return self._view._repr_html_()

    @property
    def id(self) -> str:
        return self._view.id

    @property
    def view(self) -> RunView:
        """What is known of the run here; nothing is asked."""
        return self._view

    @property
    def seed(self) -> int:
        """The run's seed; that of a step is `step_seed(run.seed, number)`."""
        return self._view.seed

    @property
    def num_steps(self) -> int:
        """How many steps were made, as far as is known here."""
        return self._view.num_steps

    @property
    def state_ref(self) -> StateRef:
        """The newest state, as a spec names it."""
        return StateRef(run=self.id)

    def refresh(self) -> RunView:
        """Ask the box how the run is, and return that."""
        with self._lock:
            self._view = self._client.connection.ask(RunView, "GET", self._path())
            return self._view

    def step(
        self,
        inputs: Any,
        loss: Loss,
        *,
        lr: Rates | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        progress: bool | None = None,
        **options: Unpack[StepKeywords],
    ) -> TrainStep:
        """Make the next step: a gradient at the run's weights, and an update by its optimizer.

        It waits for the step. Model, wrt, mode and precision are the run's; the random streams are
        those of the seed `step_seed(run.seed, number)`. What the loss trains (parameters of a
        module, what requires grad in `loss_inputs`) belongs to the run from the first step that
        has it: its numbers here are then no longer read, and `weights()` has those of the run.

        Args:
            inputs: as for `Gradient`.
            loss: as for `Gradient`.
            lr: the learning rate from this step on, or one for each group of the optimizer and one
                for the rest; None leaves it.
            clip_norm: gradients are scaled to at most this norm over all of them.
            clip_value: and their entries cut to ± this, before.
            progress: whether to show a line with the steps a second; None shows it on a terminal
                and in a notebook.
            options: loss_inputs, penalties, readout, method, order, output, streams, retain,
                recompute, transfer, priority, timeout_s, devices and name, as for `Gradient`; and
                `returns`, by default nothing: its gradients are those before clipping.

        Raises:
            InvalidJob: the step cannot be made as it is; the subclass says why.
            RunConflict: the run is elsewhere: another client has made this step, or makes it.
            JobFailed, JobCancelled: as for `Job.result`; the run is as before.
            ServiceUnavailable: the box cannot be reached. The step may have been made all the same:
                the same call again gives it.
        """
        update = {"lr": plain(lr), "clip_norm": clip_norm, "clip_value": clip_value}
        return self._step(progress, inputs=inputs, loss=loss, **update, **options)

    def estimate(
        self,
        inputs: Any,
        loss: Loss,
        *,
        progress: bool | None = None,
        **options: Unpack[StepKeywords],
    ) -> Estimate:
        """Say what the next step would take, which is not made: see `GradClient.estimate`.

        Args:
            inputs: as for `step`.
            loss: as for `step`; no `Cotangents`.
            progress: as for `step`.
            options: as for `step`.

        Raises:
            InvalidJob: the step cannot be made as it is; the subclass says why.
            JobFailed: it fails on these shards, as the step would.
        """
        from gradbox.estimate import ask

        computation = StepGradient.of(
            self._view, self.num_steps + 1, inputs=inputs, loss=loss, **options
        )
        return ask(computation, progress=progress, **vars(self._client))

    def apply(
        self,
        *,
        lr: Rates | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        progress: bool | None = None,
        **options: Unpack[RunKeywords],
    ) -> TrainStep:
        """Make a step of what `loss.backward()` has found; see `model`.

        Args:
            lr: as for `step`.
            clip_norm: as for `step`.
            clip_value: as for `step`.
            progress: as for `step`.
            options: transfer, priority, timeout_s, devices and name, as for `Gradient`.

        Raises:
            InvalidJob: no backward pass has reached the outputs of `run.model(...)`.
            RunConflict: the outputs were computed at another state than the newest; or as for
                `step`.
            JobFailed, JobCancelled, ServiceUnavailable: as for `step`.
        """
        with self._lock:
            if self._held is None:
                raise InvalidJob(
                    "run.apply: expected gradients of a loss over the outputs of run.model(...), "
                    "got none: call loss.backward() before, once for each step"
                )
            job_id, cotangents = self._held
            update = {"lr": plain(lr), "clip_norm": clip_norm, "clip_value": clip_value}
            loss = Cotangents(cotangents, of=job_id)
            try:
                step = self._step(progress, loss=loss, **update, **options)
            except ServiceUnavailable:
                raise  # the step may have been made, which the same call again tells
            except GradboxError:
                self.release()  # the next backward pass goes through a forward job of its own
                raise
            self.release()
            return step

    def model(
        self,
        *,
        readout: Callable[..., Any] | None = None,
        progress: bool | None = False,
        **options: Unpack[ModelKeywords],
    ) -> RunModel:
        """Return the model at the run's weights as a callable, for any loss at all; needs torch.

            f = run.model(output="last_hidden_state")
            for shards in loader:
                loss = any_python(torch.cat([f(shard) for shard in shards]))
                loss.backward()  # notes the cotangents of the outputs
                run.apply(lr=schedule(run.num_steps))  # they go up, and gradients stay on the box

        As `GradClient.model`, but for what is the run's: weights, buffers, wrt, precision, seed.
        The calls of one step make one forward job: use no output before the last call is made.

        Args:
            readout: as for `Gradient`.
            progress: whether its jobs show progress bars.
            options: output, mode (by default the run's), recompute, retain, priority, timeout_s,
                devices and name, as for `GradClient.model`.

        Raises:
            ModuleNotFoundError: torch is not installed here.
        """
        from gradbox.runs.model import RunModel

        view = self._client.connection.ask(ModelView, "GET", model_path(self._model))
        given = {"readout": readout, **options}
        return RunModel(self._client, view, run=self, options=given, progress=progress)

    def at(self, step: int) -> RunState:
        """Return the state after a step, for `weights=` of any computation; 0 is the first.

        The box keeps few of them, and computes others again from the newest before.
        """
        return RunState(self._client, checked(StateRef, where="run.at", run=self.id, step=step))

    def saved(self, name: str) -> RunState:
        """Return the state that was saved under a name."""
        ref = checked(StateRef, where="run.saved", run=self.id, save=name)
        return RunState(self._client, ref)

    def save(
        self,
        name: str,
        *,
        step: int | None = None,
        shared: bool = False,
        progress: bool | None = None,
    ) -> RunState:
        """Save the state after the last step, or after another one, until it is deleted.

        Nothing happens if it is saved under that name already, but that `shared` is as given.

        Args:
            name: letters, digits, dots, dashes and underscores; unique among this user's.
            shared: whether everybody with a token of the box may read it.
            progress: as for `Job.wait`.

        Returns:
            The saved state, for `weights=` and `start=`.

        Raises:
            RunConflict: another state has the name.
            RunNotFound: the box has no state from which that one can be computed.
        """
        # The step is named, so that a request that is repeated saves the same state.
        step = self.num_steps if step is None else step
        order = checked(SaveOrder, where="run.save", name=name, step=step, shared=shared)
        body = order.model_dump_json().encode()
        self._client.ask("POST", self._path("/saves"), body).result(progress=progress)
        self.refresh()
        return self.saved(name)

    def delete_save(self, name: str) -> None:
        """Delete a saved state; nothing happens if it is gone.

        Raises:
            RunConflict: a job needs it.
        """
        order = checked(SaveOrder, where="run.delete_save", name=name)
        self._client.connection.request("DELETE", self._path(f"/saves/{order.name}"))
        self.refresh()

    def delete(self) -> None:
        """Delete the run with its states and its history; nothing happens if it is gone.

        Raises:
            RunConflict: a step is under way, or a save is left: delete that first.
        """
        self._client.connection.request("DELETE", self._path())

    def weights(self, *, progress: bool | None = None) -> dict[str, Any]:
        """Fetch what the run trains, and the model's buffers that it has changed, by name.

            model.load_state_dict(run.weights(), strict=False)

        Returns:
            Torch tensors, or NumPy arrays where torch is not installed, of the parameters' shapes,
            and in float32 where the model has 16 bits. What belongs to the loss is `loss.NAME` and
            `loss_inputs.NAME`. An adapter's go by the names of peft's `get_peft_model_state_dict`.
        """
        return self._client.weights(self.state_ref, progress=progress)

    def history(self) -> list[StepView]:
        """Return the steps that were made, in their order: loss, gradient norm, rates, seconds."""
        found: list[StepView] = []
        while True:
            after = found[-1].number if found else 0
            path = self._path(f"/steps?after={after}&limit={STEPS_LISTED}")
            page = self._client.connection.ask(History, "GET", path).steps
            found += page
            if len(page) < STEPS_LISTED:
                return Listed(found, html=History(steps=found[::-1])._repr_html_)

    def plot(self, kind: Curve = "loss", *, ax: Axes | None = None) -> Axes:
        """Draw the history with matplotlib (`pip install 'gradbox[plot]'`), and return the axes.

        Args:
            kind: "loss", "grad_norm", "lr" or "seconds".
            ax: where to draw; None makes a figure.

        Raises:
            InvalidJob: matplotlib is not installed.
            InvalidInputs: there is no such kind.
        """
        from gradbox.runs.plot import plot_history

        return plot_history(self.history(), kind, ax)

    def hold(self, job_id: str, cotangents: Mapping[str, Any]) -> None:
        """Keep cotangents of a forward job for `apply`; what is kept of that job is added.

        Raises:
            InvalidJob: some of another job are kept.
        """
        with self._lock:
            held_job, held = self._held or (job_id, {})
            if held_job != job_id:
                raise InvalidJob(
                    "expected one forward job behind each run.apply(), got a backward pass through "
                    "a second one: make all calls of a step before any output is used, and call "
                    "run.apply() after each; f.zero_grad() forgets a pass that is not applied"
                )
            kept = {n: held[n] + c if n in held else c for n, c in cotangents.items()}
            self._held = (job_id, {**held, **kept})

    def release(self) -> None:
        """Forget the cotangents that are kept for `apply`."""
        self._held = None

    @property
    def _model(self) -> str:
        return f"{self._view.model}@{self._view.model_version}"

    def _path(self, below: str = "") -> str:
        return run_path(self.id) + below

    def _step(self, progress: bool | None, **given: Any) -> TrainStep:
        with self._lock, self._shown(progress) as line:
            number = self.num_steps + 1
            computation = StepGradient.of(self._view, number, **given)
            job = self._client.post(computation, progress=progress)
            job._wait(None, progress=progress, accept=ACCEPT, bar=line)
            made = {"num_steps": number, "under_way": None}
            if job.view.state is JobState.DONE:  # also where its result is gone
                self._view = self._view.model_copy(update=made)
            step = TrainStep(job._fetched(progress=progress))
            last = {"loss": step.manifest.loss, "grad_norm": step.grad_norm}
            self._view = self._view.model_copy(update=last)
            line.step(number, step.manifest.loss)
        return step

    def _shown(self, progress: bool | None) -> StepsLine:
        if self._line is None or progress is False:
            title = self._view.name or f"run {self.id[:12]}"
            line = StepsLine(title, shown=progress, done=self.num_steps)
            if progress is False:
                return line
            self._line = line
        return self._line
