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

from gradbox_service.tokens import TokenInfo, Tokens, digest_of

LIFETIME_S: Final = 7 * 24 * 3600


class Sessions(Protocol):
    """The sessions of a box."""

    def begin(self, token: str) -> str | None:
        """Begin a session and return its secret; None if this box does not know the token."""

    def find(self, secret: str) -> TokenInfo | None:
        """Return what is known of the session's token; None if it or the session is over."""

    def end(self, secret: str) -> None:
        """End a session, if there is one."""


class RedisSessions:
    """Implements `Sessions` with a key each: the hash of a secret → the hash of its token."""

    def __init__(self, connection: redis.Redis, *, tokens: Tokens) -> None:
        self._redis = connection
        self._tokens = tokens

    def begin(self, token: str) -> str | None:
        if self._tokens.find(token) is None:
            return None
        secret = secrets.token_urlsafe(32)
        self._redis.set(_key(secret), digest_of(token), ex=LIFETIME_S)
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
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[_key(secret)] = (digest_of(token), time.monotonic() + LIFETIME_S)
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
