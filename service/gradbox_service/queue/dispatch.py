"""The dispatcher: feeds RQ's short list from the records, and puts back what no worker holds.

Records are the truth and turns are hints. A queued job whose turn is in no list and that nobody
begins gets another turn; a running job whose lease ran out goes back to the queue. Feeding a job
twice does no harm, because only one worker's `begin` applies.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

import redis

from gradbox.protocol import OperationMode
from gradbox_service.jobs import Fleet, JobRecord, Records, Turn, Turns, Usage, WorkerPresence
from gradbox_service.jobs.operation import MemoryOperation, Operation
from gradbox_service.queue.active_jobs import ActiveJobs, ReadChanges
from gradbox_service.queue.leadership import Leadership
from gradbox_service.queue.places import Places
from gradbox_service.repeating_thread import RepeatingThread

log = logging.getLogger(__name__)

# Nobody beats for a job before this much time after its begin.
LEASE_GRACE_S = 1.0
# A turn that has left the list is begun within milliseconds. After this long it is taken for lost.
TURN_GRACE_S = 5.0
LEADER_TTL_S = 5.0
LEADER_RENEWAL_S = 1.0
HALF_LIFE_S = 6 * 3600.0
# A job whose model no worker has on its device lets others go before it: so many jobs, each among
# the next so many, of owners who are at most so many device seconds behind it in line.
MAX_PASSED_BY = 4
LOOK_AHEAD = 8
WARM_LEAD_S = 10.0
# After Redis refused, workers beat again within half a second; until then no lease is judged.
REFUSED_GRACE_S = 3.0
# What no change announces (an expired lease, a lost turn) is noticed this fast.
TICK_S = 0.25
LOST = "its lease ran out: the worker's process or its machine stopped answering"


class Dispatcher(RepeatingThread):
    """Acts in the one service process that holds the leader's lock; elsewhere it only waits."""

    def __init__(
        self,
        records: Records,
        turns: Turns,
        fleet: Fleet,
        leadership: Leadership,
        *,
        operation: Operation | None = None,
        usage: Usage | None = None,
        turn_grace_s: float = TURN_GRACE_S,
        half_life_s: float = HALF_LIFE_S,
        clock: Callable[[], float] = time.time,
        ended: Callable[[JobRecord], None] = lambda _: None,
        changes: ReadChanges | None = None,
    ) -> None:
        """Hold no job yet.

        Args:
            changes: see `ActiveJobs`.
            usage: what owners used before this process led.
            half_life_s: when a device second counts half.
            clock: tells the time in which device seconds are counted.
            ended: called once with every job that ends while this process leads.
        """
        super().__init__("dispatcher")
        self.jobs = ActiveJobs(
            records, usage, half_life_s=half_life_s, clock=clock, ended=ended, changes=changes
        )
        self.leads = False
        self._records = records
        self._turns = turns
        self._fleet = fleet
        self._leadership = leadership
        self._operation = operation or MemoryOperation()
        self._turn_grace_s = turn_grace_s
        self._clock = clock
        self._places = Places(records)
        # When the turn of each fed job was last seen, by the monotonic clock.
        self._seen: dict[Turn, float] = {}
        # When the turn of each was fed that is in the list, by the clock that records tell.
        self._fed_s: dict[Turn, float] = {}
        self._passed_by: dict[str, int] = {}
        self._held_at = -LEADER_TTL_S
        self._leases_read_at = -TICK_S
        self._synced = False  # whether the changes were read right before
        self._hands_out = True
        self._workers: Sequence[WorkerPresence] = ()
        self._box_read_at = -TICK_S
        # Until when leases may have run out because nobody could renew them, by the same clock.
        self._beats_late_until = 0.0

    def tick(self, *, leases: bool = True) -> None:
        """Act once: put back lost jobs, feed what there is room for, tell places.

        Args:
            leases: whether to look for jobs whose lease has run out.
        """
        if not self._lead():
            return
        if not self._synced:
            self.jobs.sync()
            self._box_read_at = -TICK_S
        self._synced = False
        if leases and time.monotonic() >= self._beats_late_until:
            self._leases_read_at = time.monotonic()
            self._put_back_lost()
            self.jobs.keep_time()
        self._feed()

    def start(self) -> None:
        """Begin to act, on every change and four times a second."""
        # Redis may have been away together with this process.
        self._beats_late_until = time.monotonic() + REFUSED_GRACE_S
        super().start()

    def _step(self) -> None:
        try:
            self.tick(leases=time.monotonic() - self._leases_read_at >= TICK_S)
            self._wait()
        except redis.RedisError as error:
            self._beats_late_until = time.monotonic() + REFUSED_GRACE_S
            self._forget()
            log.warning("Redis does not do its part (%s); trying again", error)
            self._stopping.wait(TICK_S)
        except Exception:
            self._forget()  # what was half done is read again
            raise

    def _run(self) -> None:
        super()._run()
        try:
            self._leadership.release()
        except redis.RedisError as error:
            log.info("the leader's lock was not given back (%s); it ends by itself", error)

    def _lead(self) -> bool:
        now = time.monotonic()
        if self.leads and now - self._held_at < LEADER_RENEWAL_S:
            return True
        held = self._leadership.hold(ttl_s=LEADER_TTL_S)
        if not (self.leads and held):
            self._forget()  # others may have changed what is in memory
            self._seen.clear()
        self.leads, self._held_at = held, now
        return held

    def _forget(self) -> None:
        self.jobs.forget()
        self._synced = False

    def _wait(self) -> None:
        """Wait until a job's state changes, or for one tick."""
        if not self.leads:
            self._stopping.wait(TICK_S)
            return
        deadline = time.monotonic() + TICK_S
        while (left := deadline - time.monotonic()) > 0:
            if self._stopping.is_set():
                return
            something_new = self.jobs.sync(wait_s=left)
            self._synced = True
            if something_new:
                return

    def _put_back_lost(self) -> None:
        lost = [
            record
            for record in self.jobs.running
            if time.time() - (record.started_s or 0.0) > LEASE_GRACE_S
            and not self._records.leased(record.id, attempt=record.attempt)
        ]
        for record in lost:
            log.warning("job %s: attempt %d lost: %s", record.id, record.attempt, LOST)
            lose = partial(
                JobRecord.requeue, attempt=record.attempt, reason=LOST, now_s=time.time()
            )
            self._records.update(record.id, lose)
        self.jobs.read([record.id for record in lost])

    def _feed(self) -> None:
        if not self.jobs.waiting and not self.jobs.fed:
            return
        self._read_box()
        if not self._hands_out:
            self._turns.take_back()
            self._seen.clear()
        in_list = self._note_turns()
        idle = [worker for worker in self._workers if worker.state == "idle"]
        if not idle:
            in_list = self._without_outranked(in_list)
        room = max(1, len(idle)) - len(in_list) if self._hands_out else 0
        warm = _on_devices(idle or self._workers)
        for _ in range(room):
            record = self._next(warm)
            if record is None:
                break
            turn = _turn_of(record)
            self._turns.feed(turn)
            self._seen[turn] = time.monotonic()
            self.jobs.feed(record)
            in_list.append(turn)
            self._fed_s[turn] = self._clock()
        self._fed_s = {turn: fed_s for turn, fed_s in self._fed_s.items() if turn in in_list}
        next_up = sorted(self.jobs.fed, key=lambda r: _turn_of(r) in in_list)
        self._places.tell(self.jobs, next_up=next_up, num_workers=len(self._workers))

    def _read_box(self) -> None:
        """Read whether jobs are handed out, and who lives, if that changed or is a tick old."""
        changed, self.jobs.box_changed = self.jobs.box_changed, False
        if changed or time.monotonic() - self._box_read_at >= TICK_S:
            self._box_read_at = time.monotonic()
            self._hands_out = self._operation.read().mode is OperationMode.RUNNING
            self._workers = self._fleet.workers()

    def _without_outranked(self, in_list: list[Turn]) -> list[Turn]:
        """Withdraw the last turn in the list if a job was posted since that goes before its job.

        A turn waits in the list while all workers are busy, so that the next job begins at once;
        who comes meanwhile and is to go first need not wait for that job as well.
        """
        first = next(self.jobs.ranked(), None)
        if first is None or not in_list:
            return in_list
        last = in_list[-1]
        fed = self.jobs.queued(last.job_id)
        posted_since = first.created_s > self._fed_s.get(last, math.inf)
        if fed is None or not posted_since or not self.jobs.precedes(first, fed):
            return in_list
        if not self._turns.withdraw(last):
            return in_list
        self._seen.pop(last, None)
        self.jobs.take_back(last.job_id)
        return in_list[:-1]

    def _note_turns(self) -> list[Turn]:
        """Return the turns in the list that count; take back the jobs whose turn was lost."""
        now = time.monotonic()
        self._seen = {turn: seen for turn, seen in self._seen.items() if self._counts(turn)}
        in_list = [turn for turn in dict.fromkeys(self._turns.waiting()) if self._counts(turn)]
        self._seen |= dict.fromkeys(in_list, now)
        self._seen = {
            turn: seen for turn, seen in self._seen.items() if now - seen < self._turn_grace_s
        }
        held = {turn.job_id for turn in self._seen}
        lost = [record.id for record in self.jobs.fed if record.id not in held]
        for job_id in lost:
            self.jobs.take_back(job_id)
        self.jobs.read(lost)  # the turn may have been taken, and the change lost
        for job_id in held - {record.id for record in self.jobs.fed}:
            record = self.jobs.queued(job_id)
            if record is not None:
                self.jobs.feed(record)  # an earlier leader fed it
        return in_list

    def _counts(self, turn: Turn) -> bool:
        record = self.jobs.queued(turn.job_id)
        return record is not None and _turn_of(record) == turn

    def _next(self, warm: Collection[str]) -> JobRecord | None:
        """Return the job to feed: the first, or one close behind it whose model is on a device."""
        near = list(islice(self.jobs.ranked(), LOOK_AHEAD))
        if not near:
            self._passed_by.clear()
            return None
        first = near[0]
        passed_by = self._passed_by.pop(first.id, 0)
        if not warm or first.model in warm or passed_by >= MAX_PASSED_BY:
            return first
        shares = self.jobs.shares
        most = shares.key(first.owner) + WARM_LEAD_S * shares.weight(self._clock())
        for record in near[1:]:
            if record.priority != first.priority:
                break
            if record.model in warm and shares.key(record.owner) <= most:
                self._passed_by[first.id] = passed_by + 1
                return record
        return first


def _turn_of(record: JobRecord) -> Turn:
    return Turn(record.id, record.attempt + 1)


def _on_devices(workers: Sequence[WorkerPresence]) -> frozenset[str]:
    """Return the models that are in the memory of one of these workers' devices."""
    found = [worker.memory.models for worker in workers if worker.memory is not None]
    return frozenset(name for models in found for name in models)
