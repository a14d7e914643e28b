"""The devices that a job's leader leads: which range is where, and what a lost one is replaced by.

The leader is a device, too: it takes what is left once each other one has its range, and the ranges
of those that die. What crosses processes is counted here, by kind.
"""

from __future__ import annotations

from collections import Counter
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

from gradbox_engine import Observer
from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges import Range
from gradbox_engine.requests import Phase
from gradbox_worker.cluster.buffers import HOST, as_buffers, as_tensors, num_bytes
from gradbox_worker.cluster.messages import Helper
from gradbox_worker.cluster.shipping import ShippedInputs
from gradbox_worker.errors import JobStopped
from gradbox_worker.work import Work

LOST: Final = (RayActorError, ObjectLostError, OwnerDiedError, JobStopped)


class OpenHelper:
    """A helper with the job open on it.

    Attributes:
        held: the ranges that it has anything of.
        opened: a reference to the end of its opening.
    """

    def __init__(self, helper: Helper, opened: Any, *, job: tuple[str, int]) -> None:
        self.name, self.actor = helper.name, helper.actor
        self.writes_files = helper.writes_files
        self.held: set[int] = set()
        self.opened = opened
        self._job = job

    def ask(self, method: str, *arguments: Any) -> Any:
        """Have the job there do something, see `HelperJob`; returns a reference to its answer."""
        return self.actor.compute.remote(
            "call", self._job, self.opened, method, *as_buffers(arguments)
        )

    def holds_the_job(self) -> bool:
        """Return whether the device lives, and has the job open."""
        try:
            holds: bool = ray.get(self.actor.control.remote("holds", *self._job))
        except RayActorError:
            return False
        return holds


class Helpers:
    """The helpers of one attempt at a job.

    Attributes:
        alive: those that it has, as far as it knows.
        moved: bytes that crossed processes so far, by kind.
        device: the leader's, to which answers come.
        resumed: how often a range went on from a checkpoint on one of them, at most.
    """

    def __init__(self, work: Work, helpers: Sequence[Helper], *, own_name: str) -> None:
        """Ask nothing of any.

        Args:
            own_name: the leader's.
        """
        self._work, self._helpers, self._own_name = work, helpers, own_name
        self.alive: list[OpenHelper] = []
        self.moved: Counter[str] = Counter()
        self.device = HOST
        self.resumed = 0
        self._of: dict[int, OpenHelper | None] = {}
        self._ran: dict[int, str] = {}
        self._homes: Mapping[int, str] = {}
        self._freed: list[str] = []
        self._counting = Lock()
        self._threads: ThreadPoolExecutor

    @property
    def num_devices(self) -> int:
        """How many devices the job has, the leader among them."""
        return 1 + len(self.alive)

    def open(
        self, rows_name: str, shipped: ShippedInputs | None, *, homes: Mapping[int, str]
    ) -> None:
        """Have the job opened on those that live; nobody waits until it is.

        Args:
            rows_name: see `RowOutlet`.
            shipped: for those that do not see the data folder.
            homes: by range, the device that it goes to if that is there.
        """
        job = (self._work.job_id, self._work.attempt)
        calls = [(helper, helper.actor.control.remote("news")) for helper in self._helpers]
        living = [helper for helper, call in calls if _answered(call)]
        self._of, self._ran, self._homes = {}, {}, homes
        self.alive = []
        self._threads = ThreadPoolExecutor(max(1, len(living)), thread_name_prefix="answers")
        for helper in living:
            inputs = None if helper.sees_files else shipped
            opened = helper.actor.compute.remote("open", self._work, rows_name, inputs)
            self.alive.append(OpenHelper(helper, opened, job=job))
            if inputs is not None:
                self.count("inputs", inputs.num_bytes)

    def take(self, part: Range) -> OpenHelper | None:
        """Return the helper that a range runs on, another one if that was lost.

        Returns:
            None where it is the leader.
        """
        helper = self._of.get(part.index)
        if part.index not in self._of:
            helper = self._first(part)
        elif helper is not None and helper not in self.alive:
            choice = [*self.alive, None]
            helper = choice[part.index % len(choice)]
        self._of[part.index] = helper
        self._ran[part.index] = self._own_name if helper is None else helper.name
        return helper

    def _first(self, part: Range) -> OpenHelper | None:
        """Return a helper for a range that had none yet.

        Its own; or one by its place, so that the leader, which computes while it leads, has the
        last ones.
        """
        devices = [*self.alive, None]
        home = self._homes.get(part.index)
        if home == self._own_name:
            return None
        own = [helper for helper in self.alive if helper.name == home]
        if own:
            return own[0]
        number, num_ranges = len(devices), part.num_ranges
        if num_ranges <= number:
            return devices[number - num_ranges + part.index]
        return devices[part.index * number // num_ranges]

    @property
    def ran(self) -> list[str]:
        """The name of the device that ran each range last, in their order."""
        return [self._ran[index] for index in sorted(self._ran)]

    def call(
        self,
        helper: OpenHelper,
        method: str,
        *arguments: Any,
        sent: str = "",
        then: Callable[[Any], Any] = lambda found: found,
    ) -> Future[Any]:
        """Have a helper's job do something, and return what its answer becomes.

        Args:
            sent: as what the tensors among the arguments are counted.
        """
        self.count(sent or "inputs", num_bytes(arguments))
        return self.future(helper.ask(method, *arguments), then, helpers=(helper,))

    def future(
        self,
        reference: Any,
        then: Callable[[Any], Any] = lambda found: found,
        *,
        helpers: Sequence[OpenHelper],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Future[Any]:
        """Return what an answer becomes, in a thread; `DeviceLost` where one of the helpers died.

        Args:
            then: is given the answer, with tensors on the leader's device.
            meanwhile: called first, in the thread that waits; may use the helpers, too.
        """

        def run() -> Any:
            try:
                meanwhile()
                found = ray.get(reference)
            except RayError as error:
                raise self._failure(error, helpers) from None
            return then(as_tensors(found, device=self.device))

        return self._threads.submit(run)

    def count(self, kind: str, size_bytes: int) -> None:
        """Note that bytes crossed processes."""
        with self._counting:
            self.moved[kind] += size_bytes

    def note_resumed(self, resumed: int) -> None:
        """Note how often a range went on from a checkpoint."""
        with self._counting:
            self.resumed = max(self.resumed, resumed)

    def free_if_empty(self, helper: OpenHelper) -> None:
        """Have a helper freed that holds nothing of the job any more."""
        with self._counting:
            if not helper.held and helper in self.alive:
                self.alive.remove(helper)
                self._freed.append(helper.name)

    def free_all(self) -> None:
        """Have all helpers freed, for the leader goes on alone."""
        with self._counting:
            self._freed += [helper.name for helper in self._helpers]
            self.alive = []

    def freed(self) -> list[str]:
        """Return those that are free since the last call."""
        with self._counting:
            found, self._freed = self._freed, []
        return found

    def close(self) -> None:
        """Wait for no answer any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _failure(self, error: BaseException, helpers: Sequence[OpenHelper]) -> BaseException:
        """Return what was raised on a device as it was there, or that one of them is lost."""
        while isinstance(error, RayTaskError):
            error = error.cause
        if not isinstance(error, LOST):
            return error
        for helper in helpers:  # one that was told to stop is of no use, whether it lives or not
            lost = isinstance(error, JobStopped) or not helper.holds_the_job()
            if lost and helper in self.alive:
                self.alive.remove(helper)
        names = ", ".join(helper.name for helper in helpers)
        return DeviceLost(f"{names}: {error}")


class LedProgress:
    """Passes on how far the leader is itself; who watches adds the helpers' shards.

    Attributes:
        total: how many shards, or samples, the job has; 0 where that is not known yet.
    """

    def __init__(self, observer: Observer) -> None:
        self.total = 0
        self._observer = observer
        self._last: tuple[Phase, int] | None = None

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a step of the leader's own, or of the cotangents."""
        if phase == "cotangents":
            self._observer.step(phase, done, total)
            return
        self._last = (phase, done)
        self._observer.step(phase, done, self.total or total)

    def tick(self, phase: Phase, total: int) -> None:
        """Hear about once a second that helpers compute; may raise to stop the job."""
        self.total = total
        done = self._last[1] if self._last is not None and self._last[0] == phase else 0
        self._observer.step(phase, done, total)


def _answered(call: Any) -> bool:
    try:
        ray.get(call)
    except RayActorError:
        return False
    return True
