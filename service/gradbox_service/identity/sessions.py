"""Sessions of browsers: a secret in a cookie that stands for a token, so that no page holds it.

A session is stored as the hash of its secret beside the hash of its token, and ends by itself. Each
look goes on to the token, so a session ends with it, from the next request on.
"""

from __future__ import annotations

import secrets
import time
from typing import Final, cast

import redis

from gradbox_service.identity.tokens import TokenInfo, Tokens, digest_of

LIFETIME_S: Final = 7 * 24 * 3600
# Of one token; the oldest ends where one more begins, for each takes memory of Redis.
MAX_SESSIONS: Final = 100


class Sessions:
    """The sessions of a box, each a key: the hash of a secret → the hash of its token.

    Beside them each token has a zset of its sessions' keys by when they began.
    """

    def __init__(self, connection: redis.Redis, *, tokens: Tokens) -> None:
        self._redis = connection
        self._tokens = tokens

    def begin(self, token: str) -> str | None:
        """Begin a session and return its secret; None if this box does not know the token."""
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
        """Return what is known of the session's token; None if it or the session is over."""
        digest = cast("bytes | None", self._redis.get(_key(secret)))
        return None if digest is None else self._tokens.hashed(digest.decode())

    def end(self, secret: str) -> None:
        """End a session, if there is one."""
        self._redis.delete(_key(secret))


def _key(secret: str) -> str:
    return f"gradbox:session:{digest_of(secret)}"
