"""A worker in a thread of this process, without what needs a process of its own.

It takes turns and runs them as a device process does. What a worker does for one, from outside, a
second thread does: it survives no crash, and ends no code that will not stop.
"""

from __future__ import annotations

import threading
from pathlib import Path

from gradbox_service.fleet import Fleet
from gradbox_service.jobs import Records, Turns
from gradbox_service.runs import Runs
from gradbox_service.store import BlobStore, ResultStore
from gradbox_service.stores import Stores
from gradbox_worker.device.entry import DeviceEntry
from gradbox_worker.device.last_step import LastStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.runs import RecordedRuns
from gradbox_worker.turns.presence import Announcer
from gradbox_worker.turns.serving import take_turns
from gradbox_worker.turns.supervision import AttemptWatch, Patience
from gradbox_worker.turns.turn import Attempts, TurnRunner
from gradbox_worker.work import Outcome, Supervision, Work

LOOK_S = 0.1
_one_job = threading.Lock()  # all jobs of a process draw from its global random generators


class SharedDevice(WarmDevice):
    """A device of a process in which several run jobs, one at a time."""

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        with _one_job:
            return super().run(work, supervision)


class InThreadWorker:
    """A worker in threads.

    with InThreadWorker(models_file, records=…, turns=…, fleet=…, blobs=…, results=…):
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
        name: str = "inthread",
        device: str = "cpu",
    ) -> None:
        """Load the models; no thread runs yet."""
        self._settings = DeviceSettings(models_file=models_file, data=results.data, device=device)
        self._blobs, runs = blobs, Runs(records._redis)
        self._book = RecordedRuns(runs, records, results)
        self._name, self._records, self._turns, self._fleet = name, records, turns, fleet
        self._announcer = Announcer(fleet, name=name)
        self._orders, self._step = Orders(), LastStep()
        self._runner = TurnRunner(
            Attempts(records, turns, results, runs, Stores(records._redis, results.data), name),
            self._opened(),
            self._orders,
            self._step,
            lease_s=Patience().lease_s,
            fleet=fleet,
        )
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(
                target=take_turns,
                args=[turns, self._runner],
                kwargs={"when_quiet": lambda: None},
                daemon=True,
            ),
            threading.Thread(target=self._watch, daemon=True),
        ]

    def __enter__(self) -> InThreadWorker:
        self._announcer.announce("idle")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.ask_for_end()
        self._orders.ask_to_look()
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._announcer.retire()

    def _watch(self) -> None:
        watch: AttemptWatch | None = None
        while not self._ended.wait(LOOK_S):
            self._announcer.announce("idle")
            self._reload_if_asked()
            held = self._turns.held(self._name)
            if held is None:
                continue
            if watch is None or watch.held != held:
                watch = AttemptWatch(self._records, held, patience=Patience())
            watch.look(self._step.read())
            if watch.stop_reason is not None:
                self._orders.ask_to_look()

    def _reload_if_asked(self) -> None:
        asked = self._fleet.reloads()
        if asked == self._announcer.reloads:
            return
        try:
            with _one_job:
                self._runner.device = self._opened()
            self._announcer.note_reload(asked)
        except ModelsFileError as error:
            self._announcer.note_reload(asked, error=str(error))

    def _opened(self) -> SharedDevice:
        device = SharedDevice(self._settings, blobs=self._blobs, book=self._book)
        self._fleet.describe([view for view in device.views if view.usable])
        entry = DeviceEntry(
            placement=device.placement, models=device.models, unusable=device.unusable
        )
        self._announcer.offer(entry)
        return device
