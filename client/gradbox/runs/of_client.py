"""What a client has of runs: it begins them, and finds them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradbox.box_client import BoxClient
from gradbox.computations.computation import checked
from gradbox.errors import RunNotFound
from gradbox.html import Iterated
from gradbox.http.paths import run_path
from gradbox.protocol import RunList, RunView, StateRef
from gradbox.protocol.spec_fields import JOB_ID
from gradbox.runs.run import RunClient, RunState, TrainRun

if TYPE_CHECKING:
    from gradbox.computations.computation import OfARun
    from gradbox.protocol.options import Mode, Precision
    from gradbox.runs.optimizer import LoRA, Optimizer


class RunsClient(BoxClient):
    """The part of a client that trains."""

    def train(
        self,
        model: str,
        *,
        optimizer: Optimizer,
        wrt: str | Sequence[str] | None = None,
        adapter: LoRA | None = None,
        mode: Mode = "train",
        precision: Precision = "fp32",
        seed: int = 0,
        name: str = "",
        start: OfARun | str | None = None,
        start_weights: OfARun | str | None = None,
    ) -> TrainRun:
        """Begin a run: training on the box, where weights and optimizer then live.

            run = client.train("minilm", optimizer=Optimizer("adamw", lr=2e-5), wrt="encoder.*")
            step = run.step(inputs=shards, loss=info_nce, loss_inputs={"labels": labels})

        Args:
            model: NAME, or NAME@VERSION with at least 8 digits of the version.
            optimizer: such as `Optimizer("adamw", lr=2e-5)`.
            wrt: globs over the names of the parameters that are trained; by default every
                floating-point parameter.
            adapter: trained in place of the model's own parameters: `LoRA(...)`.
            mode: of all steps, as for `Gradient`.
            precision: of all steps, as for `Gradient`.
            seed: step n draws from `step_seed(seed, n)`.
            name: what listings show, and `find_run` finds.
            start: a run, a state of one or the name of a saved one, of which weights, buffers, the
                optimizer's state and the number of steps go on.
            start_weights: the same, of which weights and buffers go on under a new optimizer.

        Raises:
            InvalidJob: an argument is none that a run can have, or the state that it is to start
                from lacks something, which the message names.
            UnknownModel: there is none of that name.
            RunNotFound: there is no such state to start from.
        """
        from gradbox.runs.begin import run_spec

        given: dict[str, Any] = {"wrt": wrt, "mode": mode, "precision": precision}
        spec = run_spec(
            model, optimizer, adapter, start, start_weights, seed=seed, name=name, **given
        )
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return self._run_handle(
            self._connection.ask(RunView, "POST", "/v1/runs", spec, headers=headers)
        )

    def find_run(self, run: str) -> TrainRun:
        """Return a run by its id, or the newest of this user's by its name; it goes on from there.

        Raises:
            RunNotFound: there is no such run, or it is somebody else's.
        """
        if isinstance(run, str) and JOB_ID.fullmatch(run):
            try:
                return self._run_handle(self._connection.ask(RunView, "GET", run_path(run)))
            except RunNotFound:
                pass  # it may be a name
        named = self.runs(name=run, limit=1) if isinstance(run, str) and run else iter(())
        for found in named:
            return found
        raise RunNotFound(
            f"expected the id or the name of a run, as `gradbox runs list` shows them, got "
            f"{run!r:.120}: no run of yours has it"
        )

    def saved(self, name: str, *, run: str | None = None) -> RunState:
        """Return a state that was saved under a name: this user's, or one that another one shares.

            model.load_state_dict(client.saved("towers-good").weights(), strict=False)

        It is also what `weights=`, `start=` and `start_weights=` take. Nothing is asked yet.

        Args:
            run: the id of the run that it is of, where several users share one of this name.

        Raises:
            InvalidJob: that is no name that a state can have, or no run's id.
        """
        ref = checked(StateRef, where="client.saved", run=run, save=name)
        return RunState(self._run_client, ref)

    def runs(
        self, *, name: str | None = None, limit: int | None = None, everybodys: bool = False
    ) -> Iterator[TrainRun]:
        """Iterate over this user's runs, or those of all users, newest first.

        Args:
            name: only those of that name.
            limit: at most so many; None is all.
            everybodys: the runs of all users; for the box's owner.

        Raises:
            OwnerOnly: everybody's runs were asked for, and the token is not the box's owner's.
        """
        asked = {"name": name, "all": "true" if everybodys else None}
        first, views = self._listed("/v1/runs", RunList, lambda page: page.runs, asked, limit)
        return Iterated(map(self._run_handle, views), html=first._repr_html_)

    def _run_handle(self, view: RunView) -> TrainRun:
        return TrainRun(self._run_client, view)

    @property
    def _run_client(self) -> RunClient:
        return RunClient(self._connection, self._submitter, self._handle)
