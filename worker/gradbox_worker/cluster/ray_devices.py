"""The devices of a wide job as the engine sees them (`ranges.protocol.Devices`), on Ray.

What crosses processes, as NumPy buffers in the object store:

    shards of a range       put by the coordinator in blocks, each read when the device needs it
    Z, dL/dZ of a range     the answer of `forward`, the argument of `replay`
    sums of gradients       from the device of the right neighbour to that of the left one, in a
                            tree; the last one to the coordinator

A device whose last sum was taken is given back at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.ranges import (
    EarlierOutputs,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.requests import Shard
from gradbox_worker.cluster.array_buffers import as_buffers, as_tensors, num_bytes
from gradbox_worker.cluster.device_actor import JobStopped
from gradbox_worker.cluster.joined import JoinedCluster
from gradbox_worker.cluster.leases import Wish
from gradbox_worker.cluster.pool import Lent

BLOCK_BYTES: Final = 64 * 2**20
# A range that has lost so many devices ends them itself.
MOST_LOST: Final = 3

LOST: Final = (RayActorError, ObjectLostError, OwnerDiedError, JobStopped)

Moved = dict[str, int]
"""Bytes that crossed processes: of inputs, outputs, cotangents, sums."""


@dataclass(frozen=True)
class HeldSums:
    """The sums of a range, and of what was added to them, on the device that has them."""

    device: RayRangeDevice
    index: int


class RayDevices:
    """The devices that one wide job has leased.

    Attributes:
        moved: bytes that crossed processes so far.
        ran: by range, the name of the device that ran it last.
    """

    def __init__(
        self,
        cluster: JoinedCluster,
        lent: Sequence[Lent],
        *,
        wish: Wish,
        job: Any,
        job_key: tuple[str, int],
        read: Callable[[Range], Sequence[tuple[Position, Shard]]],
        while_waiting: Callable[[], object],
    ) -> None:
        """Open the job on each device.

        Args:
            wish: what the lease was asked for with.
            job: a reference to the `RangeJob`.
            job_key: its id and attempt.
            read: returns the shards of a range.
            while_waiting: called while no device is left; may raise to stop.
        """
        self._cluster, self._wish, self._read = cluster, wish, read
        self.job, self.job_key = job, job_key
        self._while_waiting = while_waiting
        self._threads = ThreadPoolExecutor(len(lent) + 1, thread_name_prefix="answers")
        self._unused = deque(RayRangeDevice(one, self) for one in lent)
        self.alive = list(self._unused)
        self._of: dict[int, RayRangeDevice] = {}
        self._num_lost: dict[int, int] = {}
        self._blocks: dict[int, list[Any]] = {}
        self.moved: Moved = {"inputs": 0, "outputs": 0, "cotangents": 0, "sums": 0}

    @property
    def ran(self) -> list[str]:
        """The name of the device that ran each range last, in their order."""
        return [self._of[index].name for index in sorted(self._of)]

    def weights_widened(self) -> int:
        """Return how many of the job's weights came in 16 bits."""
        widened: int = ray.get(next(iter(self._of.values())).opened)
        return widened

    def take(self, part: Range) -> RayRangeDevice:
        """Return a device for a range: its own at first, then another one.

        Raises:
            DeviceLost: the range has ended too many devices.
            ClusterGone: the head of the cluster ended.
        """
        if part.index in self._of:
            lost = self._num_lost[part.index] = self._num_lost.get(part.index, 0) + 1
            if lost >= MOST_LOST:
                raise DeviceLost(
                    f"shards {part.start} to {part.stop - 1}: {lost} devices ended while they ran "
                    f"them; ask the box's owner for their log"
                )
        device = self._unused.popleft() if self._unused else self._another(part)
        self._of[part.index] = device
        return device

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """Add the right sums to the left ones, where those are."""
        assert isinstance(left, HeldSums)
        assert isinstance(right, HeldSums)
        taken = right.device.actor.take_sums.remote(right.index)

        def then(bytes_added: int) -> Sums:
            self.moved["sums"] += bytes_added
            right.device.held.discard(right.index)
            self._give_back_if_empty(right.device)
            return left

        added = left.device.actor.add.remote(left.index, taken)
        return self.future(added, then, devices=(left.device, right.device))

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Bring sums here."""
        assert isinstance(sums, HeldSums)

        def then(buffers: Any) -> NamedSums:
            self.moved["sums"] += num_bytes(buffers)
            named: NamedSums = as_tensors(buffers, copy=False)
            return named

        taken = sums.device.actor.take_sums.remote(sums.index)
        return self.future(taken, then, devices=(sums.device,))

    def blocks(self, part: Range) -> list[tuple[list[Position], Any]]:
        """Return the shards of a range in the object store; read and put once."""
        if part.index not in self._blocks:
            self._blocks[part.index] = [
                ([position for position, _ in block], ray.put(as_buffers(dict(block))))
                for block in self._in_blocks(self._read(part))
            ]
        return self._blocks[part.index]

    def future(
        self,
        reference: Any,
        then: Callable[[Any], Any],
        *,
        devices: Sequence[RayRangeDevice],
    ) -> Future[Any]:
        """Return what an actor's answer becomes; `DeviceLost` where one of the devices died."""

        def wait() -> Any:
            try:
                found = ray.get(reference)
            except RayError as error:
                raise _failure(error, devices) from None
            return then(found)

        return self._threads.submit(wait)

    def close(self) -> None:
        """Wait for no answer any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _in_blocks(
        self, shards: Sequence[tuple[Position, Shard]]
    ) -> list[list[tuple[Position, dict[str, Any]]]]:
        blocks: list[list[tuple[Position, dict[str, Any]]]] = []
        left_bytes = 0
        for position, shard in shards:
            size_bytes = num_bytes(dict(shard))
            if size_bytes > left_bytes or not blocks:
                blocks.append([])
                left_bytes = BLOCK_BYTES
            left_bytes -= size_bytes
            self.moved["inputs"] += size_bytes
            blocks[-1].append((position, dict(shard)))
        return blocks

    def _another(self, part: Range) -> RayRangeDevice:
        """Return a device for a range whose own is lost: an idle one, else one of the job's."""
        for device in [device for device in self.alive if not device.holds_the_job()]:
            self.alive.remove(device)
            self._cluster.give_back(device.name)
        one = Wish(self._wish.lease, self._wish.model, at_most=1)
        lent = self._cluster.more(one)
        if not lent and self.alive:
            return self.alive[part.index % len(self.alive)]
        lent = lent or self._cluster.lease(one, while_waiting=self._while_waiting)
        device = RayRangeDevice(lent[0], self)
        self.alive.append(device)
        return device

    def _give_back_if_empty(self, device: RayRangeDevice) -> None:
        if not device.held and device in self.alive:
            self.alive.remove(device)
            self._cluster.give_back(device.name)


class RayRangeDevice:
    """One leased device, with the job open on it.

    Attributes:
        held: the ranges that it has anything of.
    """

    def __init__(self, lent: Lent, devices: RayDevices) -> None:
        self.name, self.actor = lent.name, lent.actor
        self.held: set[int] = set()
        self._devices = devices
        self.opened = lent.actor.open.remote(devices.job)

    def holds_the_job(self) -> bool:
        """Tell whether the device lives, and is the process that the job was opened on."""
        job = self._devices.job_key
        try:
            holds: bool = ray.get(self.actor.holds.remote(*job))
        except RayActorError:
            return False
        return holds

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Run the first pass of a range."""
        self.held.add(part.index)

        def then(buffers: Any) -> RangeOutputs:
            self._devices.moved["outputs"] += num_bytes(buffers.outputs)
            outputs: RangeOutputs = as_tensors(buffers)
            return outputs

        blocks = self._devices.blocks(part)
        answer = self.actor.forward.remote(part, blocks, self.opened)
        return self._devices.future(answer, then, devices=(self,))

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """Hold a range that an earlier job put through the model."""
        self.held.add(part.index)
        buffers = as_buffers(earlier)
        self._devices.moved["outputs"] += num_bytes(buffers)
        blocks = self._devices.blocks(part)
        answer = self.actor.resume.remote(part, buffers, blocks, self.opened)
        return self._devices.future(answer, lambda found: found, devices=(self,))

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Replay a range; its sums stay there."""

        def then(buffers: Any) -> RangeGradient:
            found: RangeGradient = as_tensors(buffers)
            return RangeGradient(**{**vars(found), "sums": HeldSums(self, part.index)})

        buffers = as_buffers(cotangents)
        self._devices.moved["cotangents"] += num_bytes(buffers)
        answer = self.actor.replay.remote(part, buffers)
        return self._devices.future(answer, then, devices=(self,))

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[None]:
        """Check the range's first shard, and give the range up."""
        answer = self.actor.check.remote(part, as_buffers(norms))
        return self._devices.future(answer, lambda found: found, devices=(self,))


def _failure(error: BaseException, devices: Sequence[RayRangeDevice]) -> BaseException:
    """Return what was raised on a device as it was there, or that one of the devices is lost."""
    while isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, LOST):
        names = ", ".join(device.name for device in devices)
        return DeviceLost(f"{names}: {error}")
    return error
