"""The dispatcher: feeds RQ's short list from the records, and puts back what no worker holds.

Records are the truth and turns are hints. A queued job whose turn is in no list and that nobody
begins gets another turn; a running job whose lease ran out goes back to the queue. Feeding a job
twice does no harm, because only one worker's `begin` applies.

It acts on every change that the process's reader of the stream passes on, and every `TICK_S`, for
what no change announces. All that it keeps in memory (`ActiveJobs`, `ShortList`) is good while it
leads: a process that begins to lead, or that Redis has refused something, reads it anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import redis

from gradbox_service.backing import Backing
from gradbox_service.database.leadership import LEADER_TTL_S
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord
from gradbox_service.queue.active_jobs import ActiveJobs
from gradbox_service.queue.following import Following, ReadChanges
from gradbox_service.queue.positions import QueuePositions
from gradbox_service.queue.short_list import TURN_GRACE_S, Choice, ShortList
from gradbox_service.repeating_thread import RepeatingThread

log = logging.getLogger(__name__)

LEADER_RENEWAL_S = 1.0
HALF_LIFE_S = 6 * 3600.0
# After Redis refused, workers beat again within half a second; until then no lease is judged.
REFUSED_GRACE_S = 3.0
# What no change announces (an expired lease, a lost turn) is noticed this fast.
TICK_S = 0.25
LOST = "its lease ran out: the worker's process or its machine stopped answering"


class Dispatcher(RepeatingThread):
    """Acts in the one service process that holds the leader's lock; elsewhere it only waits."""

    def __init__(
        self,
        box: Backing,
        *,
        turn_grace_s: float = TURN_GRACE_S,
        half_life_s: float = HALF_LIFE_S,
        clock: Callable[[], float] = time.time,
        ended: Callable[[JobRecord], None] = lambda _: None,
        changes: ReadChanges | None = None,
    ) -> None:
        """Hold no job yet.

        Args:
            changes: see `Following`.
            half_life_s: when a device second counts half.
            clock: tells the time in which device seconds are counted.
            ended: called once with every job that ends while this process leads.
        """
        super().__init__("dispatcher")
        self.jobs = ActiveJobs(half_life_s=half_life_s, clock=clock)
        self.following = Following(
            self.jobs,
            records=box.records,
            usage=box.usage,
            clock=clock,
            ended=ended,
            changes=changes,
        )
        self.leads = False  # holds the lock, and has read what there was when it began to
        self._list = ShortList(box.turns, self.jobs, grace_s=turn_grace_s, clock=clock)
        self._choice = Choice(self.jobs, clock=clock)
        self._positions = QueuePositions(box.records)
        self._box = box
        self._hold: str | None = None  # why no job is handed to a worker, if none is
        self._workers: Sequence[WorkerPresence] = ()
        # By the monotonic clock: when the lock was last renewed, and when what is to be looked at.
        self._held_at = 0.0
        self._leases_due_at = 0.0
        self._box_due_at = 0.0

    def start(self) -> None:
        """Begin to act, on every change and four times a second."""
        self._spare_leases()  # Redis may have been away together with this process
        super().start()

    def tick(self) -> None:
        """Act once, at once and on all there is; the running dispatcher waits for changes first."""
        self._leases_due_at = self._box_due_at = 0.0
        if self._lead():
            self.following.sync()
            self._act()

    def _step(self) -> None:
        try:
            if self._lead():
                self._act()
            self._wait()
        except redis.RedisError as error:
            self.leads = False
            if not isinstance(error, redis.OutOfMemoryError):  # then workers beat all the same
                self._spare_leases()
            log.warning("Redis does not do its part (%s); trying again", error)
            self._stopping.wait(TICK_S)
        except Exception:
            self.leads = False  # what was half done is read again
            raise

    def _run(self) -> None:
        super()._run()
        try:
            self._box.leadership.release()
        except redis.RedisError as error:
            log.info("the leader's lock was not given back (%s); it ends by itself", error)

    def _wait(self) -> None:
        """Wait until a job's state changes, or for one tick."""
        if not self.leads:
            self._stopping.wait(TICK_S)
            return
        deadline = time.monotonic() + TICK_S
        while (left := deadline - time.monotonic()) > 0 and not self._stopping.is_set():
            found = self.following.sync(wait_s=left)
            if found.box:
                self._box_due_at = 0.0
            if found.jobs:
                return

    def _lead(self) -> bool:
        """Hold the lock, and begin anew if another process may have held it."""
        now = time.monotonic()
        if self.leads and now - self._held_at < LEADER_RENEWAL_S:
            return True
        held, self._held_at = self._box.leadership.hold(ttl_s=LEADER_TTL_S), now
        if held and not self.leads:
            self._list.forget()
            self.following.begin()
            self._box_due_at = 0.0
        self.leads = held
        return held

    def _act(self) -> None:
        """Put back lost jobs, feed what there is room for, publish positions."""
        now = time.monotonic()
        if now >= self._leases_due_at:
            self._leases_due_at = now + TICK_S
            self._put_back_lost()
            self.jobs.keep_time()
        if not self.jobs.waiting and not self.jobs.fed:
            return
        if now >= self._box_due_at:
            self._box_due_at = now + TICK_S
            self._hold = self._box.operation.read().hold
            self._workers = self._box.fleet.workers()
        self._feed()
        self._positions.publish(
            self.jobs,
            next_up=self._list.next_up(),
            num_workers=len(self._workers),
            hold=self._hold,
        )

    def _put_back_lost(self) -> None:
        lost = [
            record
            for record in self.jobs.running
            if not self._box.records.leased(record.id, attempt=record.attempt)
        ]
        for record in lost:
            log.warning("job %s: attempt %d lost: %s", record.id, record.attempt, LOST)
            lose = partial(
                JobRecord.requeue, attempt=record.attempt, reason=LOST, now_s=time.time()
            )
            self._box.records.update(record.id, lose)
        self.following.read([record.id for record in lost])

    def _feed(self) -> None:
        """Have a turn in the list for each idle worker, or one for whoever is idle first."""
        if self._hold is not None:
            self._list.empty()
        self.following.read(self._list.look())  # the turn may be taken, and the change lost
        if self._hold is not None:
            return
        idle = [worker for worker in self._workers if worker.state == "idle"]
        if not idle:
            self._list.withdraw_outranked()
        loaded = _on_devices(idle or self._workers)
        while len(self._list) < max(1, len(idle)):
            record = self._choice.next(loaded)
            if record is None:
                return
            self._list.feed(record)

    def _spare_leases(self) -> None:
        """Judge no lease before those who could not renew theirs have done so."""
        self._leases_due_at = time.monotonic() + REFUSED_GRACE_S


def _on_devices(workers: Sequence[WorkerPresence]) -> frozenset[str]:
    """Return the models that are in the memory of one of these workers' devices."""
    found = [worker.memory.models for worker in workers if worker.memory is not None]
    return frozenset(name for models in found for name in models)
