"""The devices of a job as its leader has them: which range is where, and what replaces a lost one.

The leader is a device, too: it takes what is left once each helper has its range, and the ranges of
those that die. Whether a call is to a helper or to the leader itself, the answer is a future; what
one device gives another goes by reference, not by way of the leader. What crosses processes is
counted here, by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import ray
import torch
from ray.exceptions import (
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.one_device import done
from gradbox_worker.cluster.buffers import HOST, as_buffers, as_tensors, num_bytes
from gradbox_worker.cluster.messages import Helper
from gradbox_worker.cluster.shipping import ShippedInputs
from gradbox_worker.errors import JobStopped
from gradbox_worker.work import Work

LOST: Final = (RayActorError, ObjectLostError, OwnerDiedError, JobStopped)

Then = Callable[[Any], Any]


@dataclass(frozen=True)
class Given:
    """What a helper gives another device, or the leader."""

    helper: OpenHelper
    reference: Any


class OpenHelper:
    """A helper with the job open on it."""

    def __init__(self, helpers: Helpers, helper: Helper, opened: Any) -> None:
        """Take what it is.

        Args:
            opened: a reference to the end of its opening.
        """
        self.name, self.actor, self.sees_files = helper.name, helper.actor, helper.sees_files
        self._helpers, self._opened = helpers, opened

    def call(
        self, method: str, *arguments: Any, sent: str = "inputs", then: Then = lambda found: found
    ) -> Future[Any]:
        """Have a method of its ranges called, and return what the answer becomes.

        Args:
            sent: as what the tensors among the arguments are counted; "" where the answer says.
            then: is given the answer, with tensors on the leader's device.
        """
        if sent:
            self._helpers.count(sent, num_bytes(arguments))
        given = [one for one in arguments if isinstance(one, Given)]
        plain = [one.reference if isinstance(one, Given) else one for one in arguments]
        concerned = [self, *(one.helper for one in given)]
        return self._helpers.future(self._ask(method, *plain), then, concerned)

    def give(self, method: str, *arguments: Any) -> Given:
        """Return what a method gives, as an argument of a call to another device."""
        return Given(self, self._ask(method, *arguments))

    def share(self, value: Any) -> Any:
        """Return a value as an argument, whose bytes are sent to all helpers once."""
        return self._helpers.put(value)

    def moved(self, kind: str, value: Any) -> Any:
        """Count what came from it, and return it."""
        self._helpers.count(kind, num_bytes(value))
        return value

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.actor.compute.remote(
            "call", self._helpers.job, self._opened, method, *as_buffers(arguments)
        )


class Here:
    """The leader itself."""

    def __init__(self, helpers: Helpers, name: str, ranges: Any) -> None:
        """Take its own ranges."""
        self.name = name
        self._helpers, self._ranges = helpers, ranges

    def call(
        self, method: str, *arguments: Any, sent: str = "inputs", then: Then = lambda found: found
    ) -> Future[Any]:
        """Call a method at once; in a thread, where it waits for what a helper gives."""
        bound = getattr(self._ranges, method)
        given = [one for one in arguments if isinstance(one, Given)]
        if not given:
            return done(lambda: then(bound(*arguments)))
        (waited,) = given

        def with_found(found: Any) -> Any:
            return then(bound(*(found if one is waited else one for one in arguments)))

        return self._helpers.future(waited.reference, with_found, [waited.helper])

    def give(self, method: str, *arguments: Any) -> Any:
        """Return what a method gives."""
        return getattr(self._ranges, method)(*arguments)

    def share(self, value: Any) -> Any:
        """Return the same."""
        return value

    def moved(self, kind: str, value: Any) -> Any:
        """Return the same."""
        return value


Device = OpenHelper | Here


class Helpers:
    """The helpers of one attempt at a job.

    Attributes:
        job: its id, and the number of the attempt.
        num_devices: how many devices the job began on, the leader among them.
        alive: the helpers that it has, as far as it knows.
        moved: bytes that crossed processes so far, by kind.
        here: the leader, once it has ranges.
        resumed: how often a range went on from a checkpoint, at most.
    """

    def __init__(self, work: Work, helpers: Sequence[Helper], *, own_name: str) -> None:
        """Ask nothing of any.

        Args:
            own_name: the leader's.
        """
        self.job = (work.job_id, work.attempt)
        self._work, self._helpers, self._own_name = work, helpers, own_name
        self.num_devices = 1
        self.alive: list[OpenHelper] = []
        self.moved: Counter[str] = Counter()
        self.here: Here
        self.resumed = 0
        self._device = HOST
        self._of: dict[int, Device] = {}
        self._homes: Mapping[int, str] = {}
        self._shared: dict[int, tuple[Any, Any]] = {}
        self._counting = Lock()
        self._threads: ThreadPoolExecutor

    def open(
        self, rows_name: str, inputs: ShippedInputs | None, *, homes: Mapping[int, str]
    ) -> None:
        """Have the job opened on those that live; nobody waits until it is.

        Args:
            rows_name: see `SharedRows.kept_as`.
            inputs: for those that do not see the data folder.
            homes: by range, the device that it goes to if that is there.
        """
        calls = [(helper, helper.actor.control.remote("news")) for helper in self._helpers]
        living = [helper for helper, call in calls if _answered(call)]
        self._shared, self._homes, self.alive = {}, homes, []
        self._threads = ThreadPoolExecutor(max(1, len(living)), thread_name_prefix="answers")
        leader = ray.get_runtime_context().current_actor if living else None
        self.num_devices = 1 + len(living)
        for helper in living:
            own = None if helper.sees_files else inputs
            opened = helper.actor.compute.remote("open", self._work, leader, rows_name, own)
            self.alive.append(OpenHelper(self, helper, opened))
            self.count("inputs", 0 if own is None else own.num_bytes)

    def lead(self, ranges: Any, device: torch.device) -> None:
        """Take the leader's own ranges, and the device that answers come to."""
        self.here, self._device, self._of = Here(self, self._own_name, ranges), device, {}

    def take(self, part: Range) -> Device:
        """Return the device that a range runs on, another one if that was lost."""
        device = self._of.get(part.index)
        if device is None:
            device = self._first(part)
        elif isinstance(device, OpenHelper) and device not in self.alive:
            choice: list[Device] = [*self.alive, self.here]
            device = choice[part.index % len(choice)]
        self._of[part.index] = device
        return device

    def _first(self, part: Range) -> Device:
        """Return a device for a range that had none yet.

        Its own; or one by its place, so that the leader, which computes while it leads, has the
        last ones.
        """
        devices: list[Device] = [*self.alive, self.here]
        for device in devices:
            if device.name == self._homes.get(part.index):
                return device
        number, num_ranges = len(devices), part.num_ranges
        if num_ranges <= number:
            return devices[number - num_ranges + part.index]
        return devices[part.index * number // num_ranges]

    @property
    def readers(self) -> list[Device]:
        """Those that see the box's data folder, and last the leader, which reads it or fails."""
        return [*(helper for helper in self.alive if helper.sees_files), self.here]

    @property
    def ran(self) -> list[str]:
        """The name of the device that ran each range last, in their order."""
        return [self._of[index].name for index in sorted(self._of)]

    def future(self, reference: Any, then: Then, concerned: Sequence[OpenHelper]) -> Future[Any]:
        """Return what an answer becomes, in a thread; `DeviceLost` where one of these died."""

        def run() -> Any:
            try:
                found = ray.get(reference)
            except RayError as error:
                raise self._failure(error, concerned) from None
            return then(as_tensors(found, device=self._device))

        return self._threads.submit(run)

    def put(self, value: Any) -> Any:
        """Return a reference to a value, the same one for the same value."""
        if id(value) not in self._shared:
            self.count("inputs", num_bytes(value))
            self._shared[id(value)] = (value, ray.put(as_buffers(value)))
        return self._shared[id(value)][1]

    def count(self, kind: str, size_bytes: int) -> None:
        """Note that bytes crossed processes."""
        with self._counting:
            self.moved[kind] += size_bytes

    def note_resumed(self, resumed: int) -> None:
        """Note how often a range went on from a checkpoint."""
        with self._counting:
            self.resumed = max(self.resumed, resumed)

    def close(self) -> None:
        """Wait for no answer any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _failure(self, error: BaseException, concerned: Sequence[OpenHelper]) -> BaseException:
        """Return what was raised on a device as it was there, or that one of them is lost."""
        while isinstance(error, RayTaskError):
            error = error.cause
        if not isinstance(error, LOST):
            return error
        for helper in concerned:  # one that was told to stop is of no use, whether it lives or not
            lost = isinstance(error, JobStopped) or not _answered(
                helper.actor.control.remote("news")
            )
            if lost and helper in self.alive:
                self.alive.remove(helper)
        return DeviceLost(f"{', '.join(helper.name for helper in concerned)}: {error}")


def _answered(call: Any) -> bool:
    try:
        ray.get(call)
    except RayActorError:
        return False
    return True
