"""The dispatcher: feeds RQ's short list from the records, and puts back what no worker holds.

Records are the truth and turns are hints. A queued job whose turn is in no list and that nobody
begins gets another turn; a running job whose lease ran out goes back to the queue. Feeding a job
twice does no harm, because only one worker's `begin` applies.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

import redis

from gradbox.protocol import JobState, OperationMode
from gradbox_service.jobs import Fleet, JobRecord, Records, Turn, Turns
from gradbox_service.jobs.operation import MemoryOperation, Operation
from gradbox_service.queue.leadership import Leadership
from gradbox_service.queue.order import fair_order
from gradbox_service.repeating_thread import RepeatingThread

log = logging.getLogger(__name__)

# Nobody beats for a job before this much time after its begin.
LEASE_GRACE_S = 1.0
# A turn that has left the list is begun within milliseconds. After this long it is taken for lost.
TURN_GRACE_S = 5.0
LEADER_TTL_S = 5.0
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
        turn_grace_s: float = TURN_GRACE_S,
    ) -> None:
        super().__init__("dispatcher")
        self._records = records
        self._turns = turns
        self._fleet = fleet
        self._leadership = leadership
        self._operation = operation or MemoryOperation()
        self._turn_grace_s = turn_grace_s
        self._cursor: str | None = None
        # When the turn of each queued job was last seen, by the monotonic clock.
        self._seen: dict[Turn, float] = {}
        # Until when leases may have run out because nobody could renew them, by the same clock.
        self._beats_late_until = 0.0

    def tick(self) -> None:
        """Act once: put back lost jobs, order what waits, feed what there is room for."""
        if not self._leadership.hold(ttl_s=LEADER_TTL_S):
            self._seen.clear()
            return
        active = self._records.active()
        running = [record for record in active if record.state is JobState.RUNNING]
        if time.monotonic() >= self._beats_late_until and self._put_back_lost(running):
            active = self._records.active()
            running = [record for record in active if record.state is JobState.RUNNING]
        self._feed([record for record in active if record.state is JobState.QUEUED], running)

    def start(self) -> None:
        """Begin to act, on every change and four times a second."""
        # Redis may have been away together with this process.
        self._beats_late_until = time.monotonic() + REFUSED_GRACE_S
        super().start()

    def _step(self) -> None:
        try:
            self.tick()
            self._cursor = self._wait(self._cursor)
        except redis.RedisError as error:
            self._beats_late_until = time.monotonic() + REFUSED_GRACE_S
            log.warning("Redis does not do its part (%s); trying again", error)
            self._stopping.wait(TICK_S)

    def _run(self) -> None:
        super()._run()
        try:
            self._leadership.release()
        except redis.RedisError as error:
            log.info("the leader's lock was not given back (%s); it ends by itself", error)

    def _wait(self, cursor: str | None) -> str:
        """Wait until a job's state changes, or for one tick."""
        deadline = time.monotonic() + TICK_S
        while True:
            left = deadline - time.monotonic()
            cursor, changes = self._records.changes(cursor, wait_s=max(0.001, left))
            if left <= 0 or any(change.kind in ("state", "wake") for change in changes):
                return cursor

    def _put_back_lost(self, running: Sequence[JobRecord]) -> bool:
        lost = [
            record
            for record in running
            if time.time() - (record.started_s or 0.0) > LEASE_GRACE_S
            and not self._records.leased(record.id, attempt=record.attempt)
        ]
        for record in lost:
            log.warning("job %s: attempt %d lost: %s", record.id, record.attempt, LOST)
            lose = partial(
                JobRecord.requeue, attempt=record.attempt, reason=LOST, now_s=time.time()
            )
            self._records.update(record.id, lose)
        return bool(lost)

    def _feed(self, queued: Sequence[JobRecord], running: Sequence[JobRecord]) -> None:
        hands_out = self._operation.read().mode is OperationMode.RUNNING
        if not hands_out:
            self._turns.take_back()
            self._seen.clear()
        wanted = {Turn(record.id, record.attempt + 1): record for record in queued}
        in_list = [turn for turn in dict.fromkeys(self._turns.waiting()) if turn in wanted]
        fed = [*self._in_transit(wanted.keys(), in_list), *in_list]
        next_up = [wanted.pop(turn) for turn in fed]
        held = Counter(record.owner for record in (*running, *next_up))
        order = fair_order(wanted.values(), held=held)
        self._records.place([record.id for record in (*next_up, *order)])
        room = self._room() - len(in_list) if hands_out else 0
        for record in order[: max(0, room)]:
            turn = Turn(record.id, record.attempt + 1)
            self._turns.feed(turn)
            self._seen[turn] = time.monotonic()

    def _in_transit(self, wanted: Collection[Turn], in_list: Collection[Turn]) -> list[Turn]:
        """Return the turns that were seen lately, or are started, but are in the list no more."""
        now = time.monotonic()
        self._seen = {turn: at for turn, at in self._seen.items() if turn in wanted}
        for turn in (*in_list, *self._turns.started()):
            if turn in wanted:
                self._seen[turn] = now
        return [
            turn
            for turn, seen in self._seen.items()
            if turn not in in_list and now - seen < self._turn_grace_s
        ]

    def _room(self) -> int:
        """Return how long the list may be: a turn for every idle worker, and at least one."""
        return max(1, sum(worker.state == "idle" for worker in self._fleet.workers()))
