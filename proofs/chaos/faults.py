"""What goes wrong: a table of faults, each with how long it is injected and what must recover."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from proofs.chaos.box import Box
from proofs.chaos.disk import filled
from proofs.chaos.ledger import Ledger
from proofs.chaos.processes import Process
from proofs.chaos.proxy import Proxy
from proofs.chaos.recovery import Log, Observer, Recoveries

LONG_FREEZE_S: Final = 24.0
"""Longer than a worker's lease, and than `gradbox up` waits for a worker that says nothing."""


@dataclass(frozen=True)
class Scene:
    """What faults act on, and where they write down what happened."""

    box: Box
    proxy: Proxy
    observer: Observer
    ledger: Ledger
    recoveries: Recoveries
    rng: random.Random
    watches: list[threading.Thread] = field(default_factory=list)

    def watch(self, recovery: Callable[[], None]) -> None:
        """Measure a recovery while gentler faults go on."""
        self.watches.append(threading.Thread(target=recovery, daemon=True))
        self.watches[-1].start()

    def watch_whole(self, what: str) -> None:
        """Measure how long it takes until every part runs."""
        self.watch(lambda: self.recoveries.add(what, self.observer.until_whole()))

    @property
    def recovering(self) -> bool:
        """Whether a recovery is being measured that only gentle faults may meet."""
        return any(watch.is_alive() for watch in self.watches)


Inject = Callable[[Scene], str | None]
"""Injects one fault and says what it hit; None where there was nothing to hit."""


@contextmanager
def acted_out(
    folder: Path, *, owners: Sequence[str], num_workers: int, seed: int, verbose: bool
) -> Iterator[Scene]:
    """Run a box in a folder, with tokens for its users, and stop it whatever happens."""
    with ExitStack() as stack:
        box = Box(folder, num_workers=num_workers)
        stack.callback(box.left_over)
        stack.callback(box.stop)
        box.start()
        box.make_tokens(owners)
        proxy = Proxy(box.port)
        stack.callback(proxy.close)
        observer = Observer(box)
        stack.callback(observer.close)
        recoveries = Recoveries(Log(verbose))
        yield Scene(box, proxy, observer, Ledger(), recoveries, random.Random(seed))


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        weight: how often it is drawn, relative to the others.
        alone: injects it, and has its recovery measured.
        among: injects it and returns at once, for use among other faults; None if it cannot be.
    """

    name: str
    weight: float
    alone: Inject
    among: Inject | None = None


# --- kills ---------------------------------------------------------------------------------------


def _one(scene: Scene, *roles: str) -> Process | None:
    found = [process for role in roles for process in scene.box.processes(role)]
    return scene.rng.choice(sorted(found, key=lambda process: process.pid)) if found else None


def _kill(*roles: str) -> Inject:
    def kill(scene: Scene) -> str | None:
        process = _one(scene, *roles)
        return process.name if process and process.signal(signal.SIGKILL) else None

    return kill


def _kill_device(scene: Scene) -> str | None:
    process = _one(scene, "device")
    if process is None or not process.signal(signal.SIGKILL):
        return None
    since_s = time.time()

    def measure() -> None:
        seconds = scene.observer.until_working(process.name, since_s=since_s)
        scene.recoveries.add("device replaced", seconds)

    scene.watch(measure)
    return process.name


def _kill_worker(scene: Scene) -> str | None:
    process = _one(scene, "worker")
    if process is None:
        return None
    job = scene.observer.held_by(process.name)
    if not process.signal(signal.SIGKILL):
        return None
    since_s = time.time()

    def measure() -> None:
        if job is not None:
            seconds = scene.observer.until_resumed(job, since_s=since_s)
            scene.recoveries.add("worker's job resumed", seconds)
        seconds = scene.observer.until_working(process.name, since_s=since_s)
        scene.recoveries.add("worker working again", seconds)

    scene.watch(measure)
    return process.name


def _kill_service(scene: Scene) -> str | None:
    hit = _kill("service")(scene)
    if hit:
        scene.recoveries.add("service answering", scene.observer.until_answering())
    return hit


def _kill_valkey(scene: Scene) -> str | None:
    hit = _kill("valkey")(scene)
    if hit:
        scene.recoveries.add("valkey back", scene.observer.until_answering())
    return hit


def _kill_all(scene: Scene) -> str | None:
    processes = scene.box.processes()
    scene.rng.shuffle(processes)
    return _kill_box(scene, processes)


def _kill_up(scene: Scene) -> str | None:
    return _kill_box(scene, scene.box.processes("up"))


def _kill_box(scene: Scene, processes: Sequence[Process]) -> str:
    scene.box.kill(processes)
    scene.recoveries.add("whole box ready", scene.box.start())
    return f"{len(processes)} processes"


# --- freezes -------------------------------------------------------------------------------------


def _freeze(role: str, shortest_s: float, longest_s: float) -> Inject:
    def freeze(scene: Scene) -> str | None:
        process = _one(scene, role)
        seconds = scene.rng.uniform(shortest_s, longest_s)
        if process is None or not process.signal(signal.SIGSTOP):
            return None
        time.sleep(seconds)
        process.signal(signal.SIGCONT)
        scene.recoveries.add(f"{role} after a freeze", scene.observer.until_answering())
        return f"{process.name} for {seconds:.1f} s"

    return freeze


def _freeze_worker_long(scene: Scene) -> str | None:
    """Freeze a worker until long after it is killed for it, and measure when its job goes on."""
    process = _one(scene, "worker")
    if process is None:
        return None
    job = scene.observer.held_by(process.name)
    if not process.signal(signal.SIGSTOP):
        return None
    since_s = time.time()
    if job is not None:
        seconds = scene.observer.until_resumed(job, since_s=since_s)
        scene.recoveries.add("frozen worker's job resumed", seconds)
    time.sleep(max(0.0, since_s + LONG_FREEZE_S - time.time()))
    process.signal(signal.SIGCONT)
    scene.watch_whole("all after a long freeze")
    return process.name


def _freeze_unwatched(scene: Scene) -> str | None:
    """Freeze a worker, and who would kill it: its job is given away, and it wakes up too late."""
    process = _one(scene, "worker")
    frozen = [*scene.box.processes("up"), *([process] if process else [])]
    for each in frozen:
        each.signal(signal.SIGSTOP)
    time.sleep(LONG_FREEZE_S)
    for each in frozen:
        each.signal(signal.SIGCONT)
    scene.watch_whole("all after a long freeze")
    return process.name if process else None


def _freeze_all(scene: Scene) -> str | None:
    processes = scene.box.processes()
    seconds = scene.rng.uniform(0.5, 3.0)
    for process in processes:
        process.signal(signal.SIGSTOP)
    time.sleep(seconds)
    for process in processes:
        process.signal(signal.SIGCONT)
    scene.recoveries.add("all after a freeze", scene.observer.until_answering())
    return f"{len(processes)} processes for {seconds:.1f} s"


# --- connections and the disk --------------------------------------------------------------------


def _cut(scene: Scene) -> str | None:
    return scene.proxy.cut_somewhere(scene.rng)


def _fill_disk(scene: Scene) -> str | None:
    """Take every byte that is left on the data folder's disk, for some seconds."""
    seconds = scene.rng.uniform(2.0, 4.0)
    with scene.ledger.storage_full(), filled(scene.box.data):
        time.sleep(seconds)
    scene.watch_whole("all after a full disk")
    return f"for {seconds:.1f} s"


# Gentle: may be injected while the recovery from another fault is measured.
CUT = Fault("cut connections", 4, _cut, _cut)
FREEZE_LONG = (
    Fault("freeze a worker until it is killed", 0, _freeze_worker_long),
    Fault("freeze a worker and who watches it", 0, _freeze_unwatched),
)
FULL_DISK = Fault("fill the disk", 0, _fill_disk)
WHOLE_BOX = (
    Fault("kill every process", 1, _kill_all),
    Fault("kill gradbox up", 1, _kill_up),
)
KILLS = (
    Fault("kill a device", 4, _kill_device, _kill("device")),
    Fault("kill a worker", 3, _kill_worker, _kill("worker")),
    Fault("kill the service", 3, _kill_service, _kill("service")),
    Fault("kill valkey", 3, _kill_valkey, _kill("valkey")),
)
FAULTS = (
    *KILLS,
    Fault("kill what stands beside a device", 1, _kill("beside"), _kill("beside")),
    Fault("freeze a device", 2, _freeze("device", 0.2, 3.0)),
    Fault("freeze a worker", 2, _freeze("worker", 0.2, 3.0)),
    Fault("freeze the service", 2, _freeze("service", 0.2, 2.0)),
    Fault("freeze valkey", 2, _freeze("valkey", 0.2, 2.0)),
    Fault("freeze every process", 1, _freeze_all),
    CUT,
)


def drawn(rng: random.Random, among: Sequence[Fault]) -> Fault:
    """Draw a fault by the weights."""
    return rng.choices(among, weights=[fault.weight for fault in among])[0]
