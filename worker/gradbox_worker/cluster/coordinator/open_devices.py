"""The devices that a wide job has leased: which range is where, and what a lost one is replaced by.

What crosses processes is counted here, by kind.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Final

import ray
from ray.exceptions import (
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from gradbox_engine.errors import DeviceLost
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.ranges import Range
from gradbox_engine.requests import Group
from gradbox_worker.cluster.coordinator.joined import JoinedCluster
from gradbox_worker.cluster.coordinator.whole_job import answered
from gradbox_worker.cluster.exchange.array_buffers import as_buffers, num_bytes
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest
from gradbox_worker.errors import JobStopped

BLOCK_BYTES: Final = 64 * 2**20
PAUSE_S: Final = 0.1

LOST: Final = (RayActorError, ObjectLostError, OwnerDiedError, JobStopped)


class OpenDevices:
    """The devices that one wide job has leased, on each of which it is open.

    Attributes:
        alive: those that it has, as far as it knows.
        moved: bytes that crossed processes so far, by kind.
        resumed: how often a range of the job went on from a checkpoint, at most.
    """

    def __init__(
        self,
        cluster: JoinedCluster,
        leased: Sequence[LeasedDevice],
        *,
        request: LeaseRequest,
        job: Any,
        job_key: tuple[str, int],
        groups: Sequence[Group],
        homes: Mapping[int, str],
        while_waiting: Callable[[], object],
    ) -> None:
        """Open the job on each device.

        Args:
            request: what the lease was asked for with.
            job: a reference to the `RangeJob`.
            job_key: its id and attempt.
            groups: whose shards are sent.
            homes: by range, the device that it goes to if that is there.
            while_waiting: called while no device is left; may raise to stop.
        """
        self._cluster, self._request, self._groups = cluster, request, groups
        self.job, self.job_key = job, job_key
        self._while_waiting = while_waiting
        self._homes = homes
        self._threads = ThreadPoolExecutor(len(leased) + 1, thread_name_prefix="answers")
        self._unused = deque(OpenDevice(one, self) for one in leased)
        self.alive = list(self._unused)
        self._of: dict[int, OpenDevice] = {}
        self._blocks: dict[tuple[Position, ...], list[Any]] = {}
        self.moved: Counter[str] = Counter()
        self.resumed = 0
        self._counting = Lock()

    @property
    def ran(self) -> list[str]:
        """The name of the device that ran each range last, in their order."""
        return [self._of[index].name for index in sorted(self._of)]

    def weights_widened(self) -> int:
        """Return how many of the job's weights came in 16 bits."""
        widened: int = ray.get(next(iter(self._of.values())).opened)
        return widened

    def take(self, part: Range) -> OpenDevice:
        """Return the device of a range; another one if that was lost.

        Raises:
            ClusterGone: the head of the cluster ended.
        """
        device = self._of.get(part.index)
        if device is None:
            device = self._first(part)
        elif device not in self.alive or not device.still_holds_the_job():
            device = self._another(part)
        self._of[part.index] = device
        return device

    def _first(self, part: Range) -> OpenDevice:
        """Return a device for a range that had none yet.

        Its own; or one that has no range and is no range's own; or one of all, so that a job may
        have more ranges than devices.
        """
        home, homes = self._homes.get(part.index), set(self._homes.values())
        own = [device for device in self.alive if device.name == home]
        free = [device for device in self._unused if device.name not in homes]
        found = next(iter([*own, *free]), None)
        if found is None:
            return self.alive[part.index % len(self.alive)] if self.alive else self._another(part)
        if found in self._unused:
            self._unused.remove(found)
        return found

    def blocks(self, positions: Sequence[Position]) -> list[tuple[list[Position], Any]]:
        """Return shards in the object store; read and put once."""
        key = tuple(positions)
        if key not in self._blocks:
            self._blocks[key] = [
                ([position for position, _ in block], ray.put(as_buffers(dict(block))))
                for block in self._in_blocks(positions)
            ]
        return self._blocks[key]

    def future(
        self,
        reference: Any,
        then: Callable[[Any], Any] = lambda found: found,
        *,
        devices: Sequence[OpenDevice],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Future[Any]:
        """Return what an actor's answer becomes; `DeviceLost` where one of the devices died.

        Args:
            meanwhile: called first, in the thread that waits; may use the devices, too.
        """

        def wait() -> Any:
            meanwhile()
            return ray.get(reference)

        return self.called(wait, then, devices=devices)

    def called(
        self,
        call: Callable[[], Any],
        then: Callable[[Any], Any] = lambda found: found,
        *,
        devices: Sequence[OpenDevice],
    ) -> Future[Any]:
        """Return what a call that waits for devices becomes, in a thread; see `future`."""

        def run() -> Any:
            try:
                found = call()
            except RayError as error:
                raise _failure(error, devices) from None
            return then(found)

        return self._threads.submit(run)

    def count(self, kind: str, size_bytes: int) -> None:
        """Note that bytes crossed processes."""
        with self._counting:
            self.moved[kind] += size_bytes

    def note_resumed(self, resumed: int) -> None:
        """Note how often a range went on from a checkpoint."""
        with self._counting:
            self.resumed = max(self.resumed, resumed)

    def give_back_if_empty(self, device: OpenDevice) -> None:
        """Give a device back that holds nothing of the job any more."""
        if not device.held and device in self.alive:
            self.alive.remove(device)
            self._cluster.give_back(device.leased)

    def close(self) -> None:
        """Wait for no answer any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _in_blocks(
        self, positions: Sequence[Position]
    ) -> list[list[tuple[Position, dict[str, Any]]]]:
        blocks: list[list[tuple[Position, dict[str, Any]]]] = []
        left_bytes = 0
        for position in positions:
            shard = dict(self._groups[position.group].shards[position.shard])
            size_bytes = num_bytes(shard)
            if size_bytes > left_bytes or not blocks:
                blocks.append([])
                left_bytes = BLOCK_BYTES
            left_bytes -= size_bytes
            self.count("inputs", size_bytes)
            blocks[-1].append((position, shard))
        return blocks

    def _another(self, part: Range) -> OpenDevice:
        """Return a device for a range whose own is lost: an idle one, else one of the job's."""
        for device in [device for device in self.alive if not device.holds_the_job()]:
            self.alive.remove(device)
            self._cluster.give_back(device.leased)
        leased = self._idle()
        if leased is None and self.alive:
            return self.alive[part.index % len(self.alive)]
        while leased is None:
            time.sleep(PAUSE_S)
            leased = self._idle(wait=True)
        device = OpenDevice(leased, self)
        self.alive.append(device)
        return device

    def _idle(self, *, wait: bool = False) -> LeasedDevice | None:
        """Return an idle device that answers this process.

        One that died while it was idle is given back. So is one that has just started again, and
        answers the pool: Ray tells each process on its own that an actor is back, and until then
        fails its calls at once, so that one death would count as many.
        """
        one = LeaseRequest(self._request.lease, self._request.model, at_most=1)
        if wait:
            found = self._cluster.lease(one, while_waiting=self._while_waiting)
        else:
            found = self._cluster.more(one)
        for leased in found:
            if answered(leased.actor.news.remote()):
                return leased
            self._cluster.give_back(leased)
        return None


class OpenDevice:
    """One leased device, with the job open on it.

    Attributes:
        held: the ranges that it has anything of.
        suspected: whether a call on it has failed, so that it may be lost.
    """

    def __init__(self, leased: LeasedDevice, devices: OpenDevices) -> None:
        self.leased = leased
        self.name, self.actor, self.writes_files = leased.name, leased.actor, leased.writes_files
        self.held: set[int] = set()
        self.suspected = False
        self._job_key = devices.job_key
        self.opened = leased.actor.open.remote(devices.job)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Have the device do something for the job; returns a reference to its answer."""
        return getattr(self.actor, name).remote(self._job_key, *arguments)

    def holds_the_job(self) -> bool:
        """Return whether the device lives, and is the process that the job was opened on."""
        try:
            holds: bool = ray.get(self.actor.holds.remote(*self._job_key))
        except RayActorError:
            return False
        return holds

    def still_holds_the_job(self) -> bool:
        """Tell the same of a device that held it, and ask only if there is a reason to."""
        if self.suspected:
            self.suspected = not self.holds_the_job()
        return not self.suspected


def _failure(error: BaseException, devices: Sequence[OpenDevice]) -> BaseException:
    """Return what was raised on a device as it was there, or that one of the devices is lost."""
    while isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, LOST):
        for device in devices:
            device.suspected = True
        names = ", ".join(device.name for device in devices)
        return DeviceLost(f"{names}: {error}")
    return error
