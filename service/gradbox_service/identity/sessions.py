"""Sessions of browsers: a secret in a cookie that stands for a token, so that no page holds it.

A session is stored as the hash of its secret beside the hash of its token, and ends by itself. Each
look goes on to the token, so a session ends with it, from the next request on.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final, Protocol, cast

import redis

from gradbox_service.identity.tokens import TokenInfo, Tokens, digest_of

LIFETIME_S: Final = 7 * 24 * 3600
# Of one token; the oldest ends where one more begins, for each takes memory of Redis.
MAX_SESSIONS: Final = 100


class Sessions(Protocol):
    """The sessions of a box."""

    def begin(self, token: str) -> str | None:
        """Begin a session and return its secret; None if this box does not know the token."""

    def find(self, secret: str) -> TokenInfo | None:
        """Return what is known of the session's token; None if it or the session is over."""

    def end(self, secret: str) -> None:
        """End a session, if there is one."""


class RedisSessions:
    """Implements `Sessions` with a key each: the hash of a secret → the hash of its token.

    Beside them each token has a zset of its sessions' keys by when they began.
    """

    def __init__(self, connection: redis.Redis, *, tokens: Tokens) -> None:
        self._redis = connection
        self._tokens = tokens

    def begin(self, token: str) -> str | None:
        if self._tokens.find(token) is None:
            return None
        secret, digest = secrets.token_urlsafe(32), digest_of(token)
        own = f"gradbox:sessions:{digest}"
        with self._redis.pipeline() as pipe:
            pipe.set(_key(secret), digest, ex=LIFETIME_S)
            pipe.zadd(own, {_key(secret): time.time()})
            pipe.expire(own, LIFETIME_S)
            pipe.zrange(own, 0, -MAX_SESSIONS - 1)
            oldest = cast("list[bytes]", pipe.execute()[-1])
        if oldest:
            self._redis.delete(*oldest)
            self._redis.zrem(own, *oldest)
        return secret

    def find(self, secret: str) -> TokenInfo | None:
        digest = cast("bytes | None", self._redis.get(_key(secret)))
        return None if digest is None else self._tokens.hashed(digest.decode())

    def end(self, secret: str) -> None:
        self._redis.delete(_key(secret))


class MemorySessions:
    """The in-memory twin of `RedisSessions`."""

    def __init__(self, *, tokens: Tokens) -> None:
        self._tokens = tokens
        self._sessions: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def begin(self, token: str) -> str | None:
        if self._tokens.find(token) is None:
            return None
        secret, digest = secrets.token_urlsafe(32), digest_of(token)
        with self._lock:
            own = [key for key, (other, _) in self._sessions.items() if other == digest]
            for key in own[: max(0, len(own) + 1 - MAX_SESSIONS)]:
                del self._sessions[key]
            self._sessions[_key(secret)] = (digest, time.monotonic() + LIFETIME_S)
        return secret

    def find(self, secret: str) -> TokenInfo | None:
        with self._lock:
            digest, until = self._sessions.get(_key(secret), ("", 0.0))
        return self._tokens.hashed(digest) if time.monotonic() < until else None

    def end(self, secret: str) -> None:
        with self._lock:
            self._sessions.pop(_key(secret), None)


def _key(secret: str) -> str:
    return f"gradbox:session:{digest_of(secret)}"
