"""The in-process twin of the worker: same turns, same engine, no second process.

For tests, and for a box inside one process. What needs a process of its own, such as surviving a
crash or ending code that will not stop, it does not do.
"""

from __future__ import annotations

import threading
from pathlib import Path

from gradbox.protocol import ModelView
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import Records, Turns
from gradbox_service.store import BlobStore, ResultStore
from gradbox_worker.computations.execution import Execution, StopNow
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.placement import choose_device
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from gradbox_worker.turns.presence import Announcer
from gradbox_worker.turns.turn import TurnRunner
from gradbox_worker.work import Failed, Outcome, Supervision, Work

_one_job = threading.Lock()  # all jobs of a process draw from its global random generators


class InlineDevice:
    """Implements `Device` in the calling thread, one job at a time in the whole process."""

    def __init__(self, registry: Registry, *, blobs: BlobStore) -> None:
        self.models: list[ModelView] = registry.describe()
        self._registry = registry
        self._blobs = blobs
        self._kept = KeptGraphs()

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        """Run a job to its end; an order to stop is obeyed before the next shard."""
        execution = Execution(
            work=work,
            registry=self._registry,
            blobs=self._blobs,
            kept=self._kept,
            observer=_Relay(supervision),
            phase_ended=supervision.phase_ended if work.timed else None,
        )
        with _one_job:
            answer = execution.attempt()
        return Failed(answer.problem) if isinstance(answer, Caught) else answer

    def reload(self, registry: Registry) -> None:
        """Serve the models of another registry from now on."""
        self._kept.drop()
        self._registry, self.models = registry, registry.describe()

    def rest(self) -> None:
        """Free graphs of forward jobs that no gradient job used in time; called between jobs."""
        if self._kept.idle_left_s() == 0:
            self._kept.drop()


class _Relay:
    """The engine's observer that asks the supervision itself."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision

    def step(self, phase: str, done: int, total: int) -> None:
        if self._supervision.poll() is not None:
            raise StopNow
        self._supervision.progress(phase, done, total)


class InlineWorker:
    """A worker in a thread: takes turns and runs them one after the other.

    with InlineWorker(models_file, records=…, turns=…, fleet=…, blobs=…, results=…):
        …
    """

    def __init__(
        self,
        models_file: Path,
        *,
        records: Records,
        turns: Turns,
        fleet: Fleet,
        blobs: BlobStore,
        results: ResultStore,
        name: str = "inline",
        device: str = "cpu",
    ) -> None:
        """Load the models; no thread runs yet.

        Raises:
            ModelsFileError: the models file cannot be read.
            DeviceNotStarted: there is no such device.
        """
        self._models_file, self._placement = models_file, choose_device(device)
        self._turns = turns
        self._stop = threading.Event()
        self._announcer = Announcer(fleet, name=name)
        self._device = InlineDevice(self._registry(), blobs=blobs)
        self._announcer.offer(self._device.models, device=str(self._placement))
        self._runner = TurnRunner(
            records=records,
            results=results,
            device=self._device,
            worker=name,
            leaving=self._stop.is_set,
            fleet=fleet,
        )
        self._thread = threading.Thread(target=self._work, name=f"gradbox-{name}", daemon=True)

    def __enter__(self) -> InlineWorker:
        self._announcer.announce("idle")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._announcer.retire()

    def _work(self) -> None:
        while not self._stop.is_set():
            self._announcer.announce("idle")
            self._reload_if_asked()
            turn = self._turns.take(wait_s=0.05)
            self._device.rest()
            if turn is not None:
                self._announcer.announce("busy", job=turn.job_id)
                self._runner.run(turn.job_id)

    def _registry(self) -> Registry:
        return Registry(read_models_file(self._models_file), device=self._placement)

    def _reload_if_asked(self) -> None:
        asked = self._announcer.reload_asked()
        if asked is None:
            return
        try:
            self._device.reload(self._registry())
            self._announcer.offer(self._device.models, device=str(self._placement))
            self._announcer.note_reload(asked)
        except ModelsFileError as error:
            self._announcer.note_reload(asked, error=str(error))
