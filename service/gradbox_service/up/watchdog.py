"""Asks the parts of a box whether they answer, so that one that hangs can be started again.

Of Redis it also learns when a box that drains has nothing left to do.

service   /livez answers with 200
Redis     answers at all, be it with a refusal
worker    its entry in the fleet is fresh: it renews it every two seconds, busy or not, from a
          process that never computes
cluster   the entry of any of its devices is, for its head renews them all

A silence counts once a part was asked several times in it: after a freeze of this process, or of
the whole machine, none has answered for long, and all do so with the next question.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from typing import Final

import httpx
import redis

from gradbox.protocol import JobState, OperationMode
from gradbox_service.database.connection import connect
from gradbox_service.fleet.operation import Operation
from gradbox_service.fleet.workers import Fleet
from gradbox_service.jobs import Records
from gradbox_service.repeating_thread import RepeatingThread
from gradbox_service.up.devices import CLUSTER
from gradbox_service.up.embedded_redis import NAME as REDIS

SERVICE: Final = "service"
LOOK_S: Final = 1.0
ANSWER_S: Final = 5.0
# After so long a silence a part is taken to hang. A worker's entry lives 8 s by itself, and its
# job must go on within 25 s, of which a new worker and its device take 6 to 12 to start.
SILENCE_S: Final = 15.0
WORKER_SILENCE_S: Final = 3.0
NUM_UNANSWERED: Final = 3
# Loading a large append-only file, or importing on a slow disk, is no silence.
START_S: Final = 60.0


class Watchdog(RepeatingThread):
    """Notes when each part last answered, once a second; whoever supervises them reads it.

    Attributes:
        drained: whether the box drains and nothing runs any more.
    """

    def __init__(self, url: str, *, redis_url: str, workers: Sequence[str]) -> None:
        """Ask nobody yet.

        Args:
            url: of the service.
            workers: the names of the workers, or of the head of the cluster.
        """
        super().__init__("watchdog")
        self._url = url
        self._connection = connect(redis_url, retries=0, timeout_s=ANSWER_S)
        self._fleet = Fleet(self._connection)
        self._workers = list(workers)
        self._heard: dict[str, float] = {}
        self._num_unanswered: Counter[str] = Counter()  # in a row, by part
        self.drained = False

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._connection.close()

    def heard_s(self, name: str) -> float:
        """Return when a part last answered, by the monotonic clock; 0 if it never did."""
        return self._heard.get(name, 0.0)

    def hangs(self, name: str, *, started_s: float) -> bool:
        """Return whether a part that was started at this time, by the same clock, hangs."""
        silence_s = WORKER_SILENCE_S if name in self._workers else SILENCE_S
        heard_s = self.heard_s(name)
        awaited_since_s = heard_s if heard_s > started_s else started_s + START_S
        silent = time.monotonic() - awaited_since_s > silence_s
        return silent and self._num_unanswered[name] >= NUM_UNANSWERED

    def _step(self) -> None:
        live = set(self._live_parts())
        if answers(f"{self._url}/livez"):
            live.add(SERVICE)
        self._note(live)
        self._stopping.wait(LOOK_S)

    def _live_parts(self) -> Sequence[str]:
        """Return which of Redis and the workers live, as far as Redis lets them say so."""
        try:
            self._connection.set("gradbox:watchdog", 1, px=int(LOOK_S * 1000))
            self.drained = self._is_drained()
            found = [worker.name for worker in self._fleet.workers()]
            return [REDIS, *found, *([CLUSTER] if found else [])]
        except redis.BusyLoadingError:  # it reads its records, which takes what it takes
            return [REDIS, *self._workers]
        except (redis.ConnectionError, redis.TimeoutError):
            return self._workers
        except redis.RedisError:  # it refuses, for one because the disk is full
            return [REDIS, *self._workers]

    def _is_drained(self) -> bool:
        if Operation(self._connection).read().mode is not OperationMode.DRAINING:
            return False
        active = Records(self._connection).active()
        return not any(record.state is JobState.RUNNING for record in active)

    def _note(self, live: Set[str]) -> None:
        now = time.monotonic()
        self._heard |= dict.fromkeys(live, now)
        for name in (REDIS, SERVICE, *self._workers):
            self._num_unanswered[name] = 0 if name in live else self._num_unanswered[name] + 1


def answers(url: str) -> bool:
    """Return whether a service of this machine answers with 200."""
    answer = _asked(url)
    return answer is not None and answer.status_code == 200


def why_not_ready(url: str) -> str | None:
    """Return what a service of this machine says that jobs wait for; None if they can run."""
    answer = _asked(f"{url}/readyz")
    if answer is None:
        return "the service does not answer yet"
    if answer.status_code == 200:
        return None
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers with {answer.status_code}"


def _asked(url: str) -> httpx.Response | None:
    # Not by a proxy that the environment names: this is the same machine, and so its certificate
    # need not name the address that is asked.
    try:
        return httpx.get(url, timeout=ANSWER_S, verify=False, trust_env=False)
    except httpx.HTTPError:
        return None
