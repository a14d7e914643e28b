"""The dispatcher: feeds RQ's short list from the records, and puts back what no worker holds.

Records are the truth and turns are hints. A queued job whose turn is in no list and that nobody
begins gets another turn; a running job whose lease ran out goes back to the queue. Feeding a job
twice does no harm, because only one worker's `begin` applies.

It is the process's one reader of the stream of changes: it passes on what it reads (`heard`), and
acts on it, and every `TICK_S` for what no change announces. All that it keeps in memory
(`ActiveJobs`, `ShortList`) is good while it leads: a process that begins to lead, or that Redis has
refused something, reads it anew.

Where a device idles and no job waits, a job that is posted in this process is handed out by the
write that creates it: see `hands_out`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import redis

from gradbox_service.backing import Backing
from gradbox_service.database.leadership import LEADER_TTL_S
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import Change, JobRecord
from gradbox_service.queue.active_jobs import ActiveJobs
from gradbox_service.queue.following import Following
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
    """Acts in the one service process that holds the leader's lock; elsewhere it only reads."""

    def __init__(
        self,
        box: Backing,
        *,
        turn_grace_s: float = TURN_GRACE_S,
        half_life_s: float = HALF_LIFE_S,
        clock: Callable[[], float] = time.time,
        ended: Callable[[JobRecord], None] = lambda _: None,
        heard: Callable[[Sequence[Change]], None] = lambda _: None,
    ) -> None:
        """Hold no job yet.

        Args:
            half_life_s: when a device second counts half.
            clock: tells the time in which device seconds are counted.
            ended: called once with every job that ends while this process leads.
            heard: called with all changes as they are read, whether this process leads or not.
        """
        super().__init__("dispatcher")
        self.jobs = ActiveJobs(half_life_s=half_life_s, clock=clock)
        self.following = Following(
            self.jobs, records=box.records, usage=box.usage, clock=clock, ended=ended
        )
        self.leads = False  # holds the lock, and has read what there was when it began to
        self._list = ShortList(box.turns, self.jobs, grace_s=turn_grace_s, clock=clock)
        self._choice = Choice(self.jobs, clock=clock)
        self._positions = QueuePositions(box.records)
        self._box = box
        self._heard = heard
        self._cursor: str | None = None  # up to which the changes were read
        self._state = threading.Lock()  # held by who reads or changes `jobs` and the list
        self._hold: str | None = None  # why no job is handed to a worker, if none is
        self._workers: Sequence[WorkerPresence] = ()
        # By the monotonic clock: when the lock was last renewed, and when what is to be looked at.
        self._held_at = 0.0
        self._leases_due_at = 0.0
        self._due_at = 0.0
        self._box_due_at = 0.0

    def start(self) -> None:
        """Begin to act, on every change and four times a second."""
        self._spare_leases()  # Redis may have been away together with this process
        super().start()

    def tick(self) -> None:
        """Act once, at once and on all there is; the running dispatcher waits for changes first."""
        self._due_at = self._leases_due_at = self._box_due_at = 0.0
        self._read_and_act()

    def hands_out(
        self, record: JobRecord, *, workers: Sequence[WorkerPresence], hold: str | None
    ) -> bool:
        """Return whether the write that creates a job is to feed its turn, too.

        It is where this process leads, nobody waits, and one of the workers, which all have its
        model, holds no job. The job counts as fed from then on; see `not_created`.

        Args:
            hold: why no job is handed to a worker, if none is.
        """
        if hold is not None or not self.leads or not self._state.acquire(blocking=False):
            return False  # where the dispatcher is at work, it feeds the job in a moment
        try:
            ready = [worker for worker in workers if worker.state != "starting"]
            num_held = len(self.jobs.fed) + len(self.jobs.running)
            wanted = (record.model, record.model_version)
            idles = not self.jobs.waiting and num_held < len(ready)
            if not idles or not all(wanted in worker.models.items() for worker in ready):
                return False
            self.jobs.put(record)
            self._list.note_fed(record)
            return True
        finally:
            self._state.release()

    def num_active(self, owner: str) -> int:
        """Return how many of an owner's jobs wait or run: those known here where this leads."""
        return self.jobs.num_of(owner) if self.leads else self._box.records.num_active(owner)

    def prefers(self, last: JobRecord) -> str:
        """Return the worker that ran a job if it idles since, for a job that `hands_out` fed.

        It has what the job left on its device. "" where it is busy, or may be in a moment.
        """
        with self._state:
            busy = {record.worker for record in self.jobs.running if record.id != last.id}
            fed = len(self.jobs.fed)
        return "" if fed > 1 or last.worker in busy else last.worker or ""

    def not_created(self, record: JobRecord) -> None:
        """Forget a job that was to be handed out, and was not created."""
        with self._state:
            self.jobs.remove(record.id)

    def _step(self) -> None:
        try:
            self._read_and_act(wait_s=max(0.0, self._due_at - time.monotonic()))
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

    def _read_and_act(self, *, wait_s: float = 0.0) -> None:
        """Wait for changes, pass them on, and act where they, or the time, give reason to."""
        changes = self._changes(wait_s)
        now = time.monotonic()
        is_due = now >= self._due_at
        if is_due:
            self._due_at = now + TICK_S
        with self._state:
            began_to_lead = self._lead()
            if not self.leads:
                return
            found = self.following.note(self._cursor or "", changes)
            if found.box:
                self._box_due_at = 0.0
            if is_due or began_to_lead or found.jobs or found.box:
                self._act(is_due=is_due)

    def _changes(self, wait_s: float) -> Sequence[Change]:
        """Wait for changes, and pass them on."""
        after = self._cursor
        self._cursor, changes = self._box.records.changes(after, wait_s=wait_s)
        if after is None:
            changes = [Change("", "missed")]  # whatever was before
        if changes:
            self._heard(changes)
        return changes

    def _lead(self) -> bool:
        """Hold the lock, and begin anew if another process may have held it; True if so."""
        now = time.monotonic()
        if self.leads and now - self._held_at < LEADER_RENEWAL_S:
            return False
        held, self._held_at = self._box.leadership.hold(ttl_s=LEADER_TTL_S), now
        begins = held and not self.leads
        if begins:
            self._list.forget()
            self.following.begin()
            self._box_due_at = 0.0
        self.leads = held
        return begins

    def _act(self, *, is_due: bool) -> None:
        """Put back lost jobs, feed what there is room for, store positions."""
        now = time.monotonic()
        if now >= self._leases_due_at:
            self._leases_due_at = now + TICK_S
            self._put_back_lost()
            self.jobs.keep_time()
        lingers = self._list.lingers() or self._positions.stored
        if not self.jobs.waiting and not (is_due and lingers):
            return
        if now >= self._box_due_at:
            self._box_due_at = now + TICK_S
            self._hold = self._box.operation.read().hold
            self._workers = self._box.fleet.workers()
        self._feed()
        self._positions.store(
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
        busy = {record.worker for record in self.jobs.running}
        idle = [w for w in self._workers if w.state != "starting" and w.name not in busy]
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
