"""One of several service processes feeds the queue: whoever holds this lock."""

from __future__ import annotations

from typing import Protocol

import redis
from redis.exceptions import LockError

LEADER = "gradbox:leader"


class Leadership(Protocol):
    """A lock that ends by itself."""

    def hold(self, *, ttl_s: float) -> bool:
        """Take or renew the lock for `ttl_s`; False if another process holds it."""

    def release(self) -> None:
        """Give the lock back, if it is held."""


class RedisLeadership:
    """Implements `Leadership` with redis-py's lock, whose token tells this process from others."""

    def __init__(self, connection: redis.Redis) -> None:
        # Shared by the threads of this process: it is the process that leads.
        self._lock = connection.lock(LEADER, blocking=False, thread_local=False)

    def hold(self, *, ttl_s: float) -> bool:
        try:
            return bool(self._lock.extend(ttl_s, replace_ttl=True))
        except LockError:  # never taken, or it ran out
            self._lock.timeout = ttl_s
            return bool(self._lock.acquire())

    def release(self) -> None:
        try:
            self._lock.release()
        except LockError:
            return


class SoleLeadership:
    """The twin for a service that is alone with its memory."""

    def hold(self, *, ttl_s: float) -> bool:
        return True

    def release(self) -> None:
        """There is nobody to give it to."""
