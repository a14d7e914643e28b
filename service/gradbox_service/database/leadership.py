"""One of several service processes feeds the queue and cleans: whoever holds this lock."""

from __future__ import annotations

import secrets

import redis

from gradbox_service.database.conditional_commands import ConditionalCommands

LEADER = "gradbox:leader"
# How long a process leads that has just said so.
LEADER_TTL_S = 5.0


class Leadership:
    """A lock that ends by itself: a key that holds a token, which tells one process from others.

    The threads of a process share it: it is the process that leads. It can be taken also where
    Redis has as much memory as it may, for who leads is who makes room.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._commands = ConditionalCommands(connection, over_bound=True)
        self._token = secrets.token_hex(16)

    def hold(self, *, ttl_s: float) -> bool:
        """Take or renew the lock for `ttl_s`; False if another process holds it."""
        return any(self._set(ttl_s, where=held_by) for held_by in (self._token, ""))

    def release(self) -> None:
        """Give the lock back, if it is held."""
        pipe = self._redis.pipeline()
        pipe.delete(LEADER)
        self._commands.run(pipe, where={LEADER: self._token})

    def _set(self, ttl_s: float, *, where: str) -> bool:
        pipe = self._redis.pipeline()
        pipe.set(LEADER, self._token, px=int(ttl_s * 1000))
        return self._commands.run(pipe, where={LEADER: where})
