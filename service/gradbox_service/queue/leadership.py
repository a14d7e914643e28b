"""One of several service processes feeds the queue: whoever holds this lock."""

from __future__ import annotations

import secrets
from typing import Protocol

import redis

LEADER = "gradbox:leader"

# Compare and act in one step: a process that paused longer than its lock lived must not renew, or
# release, what another has taken since.
_RENEW = """
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE = """
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class Leadership(Protocol):
    """A lock that ends by itself."""

    def hold(self, *, ttl_s: float) -> bool:
        """Take or renew the lock for `ttl_s`; False if another process holds it."""

    def release(self) -> None:
        """Give the lock back, if it is held."""


class RedisLeadership:
    """Implements `Leadership` with one key."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._token = secrets.token_hex(16)
        self._renew = connection.register_script(_RENEW)
        self._release = connection.register_script(_RELEASE)

    def hold(self, *, ttl_s: float) -> bool:
        ttl_ms = max(1, int(ttl_s * 1000))
        if self._redis.set(LEADER, self._token, nx=True, px=ttl_ms):
            return True
        return bool(self._renew(keys=[LEADER], args=[self._token, ttl_ms]))

    def release(self) -> None:
        self._release(keys=[LEADER], args=[self._token])


class SoleLeadership:
    """The twin for a service that is alone with its memory."""

    def hold(self, *, ttl_s: float) -> bool:
        return True

    def release(self) -> None:
        """There is nobody to give it to."""
