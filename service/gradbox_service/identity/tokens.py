"""Bearer tokens: made here, shown once, stored as their hash.

A token has 256 random bits, so a plain SHA-256 cannot be searched, and looking the hash up reveals
nothing about the token by its timing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import cast

import redis
from pydantic import BaseModel, ConfigDict

from gradbox.errors import GradboxError
from gradbox_service.database.conditional_commands import ConditionalCommands

log = logging.getLogger(__name__)

TOKENS = "gradbox:tokens"
PREFIX = "gbx_"
ID_LENGTH = 12


class BadTokenName(GradboxError, ValueError):
    """A token's name is not one that can be used."""

    code = "bad-token-name"
    title = "Not a name for a token"
    category = "user"
    status = 422


class TokenInfo(BaseModel):
    """What is known of a token.

    `id` begins its hash; `name` is the owner of the jobs it posts. An `admin` token is the box's
    owner's: it sees and cancels everybody's jobs, and may put its own before theirs.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    created_s: float
    admin: bool = False


class Tokens:
    """The tokens of a box: one hash."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._commands = ConditionalCommands(connection, over_bound=True)

    def create(self, name: str, *, admin: bool = False) -> str:
        """Make a token for `name` and return it; it cannot be read again.

        Raises:
            BadTokenName: see `check_name`.
        """
        check_name(name)
        token = PREFIX + secrets.token_urlsafe(32)
        digest = digest_of(token)
        info = TokenInfo(id=digest[:ID_LENGTH], name=name, created_s=time.time(), admin=admin)
        pipe = self._redis.pipeline()
        pipe.hset(TOKENS, digest, info.model_dump_json())
        self._commands.run(pipe, where={})
        return token

    def list(self) -> Sequence[TokenInfo]:
        """Return what is known of every token, oldest first."""
        return sorted(self._all().values(), key=lambda info: info.created_s)

    def revoke(self, name_or_id: str) -> int:
        """Forget the token of that id, or all of that name; return how many there were."""
        known = self._all().items()
        found = [digest for digest, info in known if name_or_id in (info.name, info.id)]
        if found:
            self._redis.hdel(TOKENS, *found)
        return len(found)

    def find(self, token: str) -> TokenInfo | None:
        """Return what is known of a token, or None if this box did not make it or it is revoked."""
        return self.hashed(digest_of(token))

    def hashed(self, digest: str) -> TokenInfo | None:
        """Return the same of the token with this hash."""
        text = cast("bytes | None", self._redis.hget(TOKENS, digest))
        return None if text is None else _read(text)

    def _all(self) -> dict[str, TokenInfo]:
        stored = cast("dict[bytes, bytes]", self._redis.hgetall(TOKENS))
        found = {digest.decode(): _read(text) for digest, text in stored.items()}
        return {digest: info for digest, info in found.items() if info is not None}


def digest_of(token: str) -> str:
    """Return the hash that a token is stored under."""
    return hashlib.sha256(token.encode()).hexdigest()


def check_name(name: str) -> None:
    """Refuse a name that would be hard to read in a listing.

    Raises:
        BadTokenName: it is empty, longer than 100 characters, or has spaces or unprintable ones.
    """
    if not name or len(name) > 100 or not name.isprintable() or " " in name:
        raise BadTokenName(
            f"a token's name has 1 to 100 printable characters and no space, got {name[:120]!r}; "
            "use a person's name or address"
        )


def _read(text: bytes) -> TokenInfo | None:
    """Return what is known of a token; None, with the bytes logged, where they are damaged."""
    try:
        return TokenInfo.model_validate_json(text)
    except ValueError:
        log.error("an entry that is no token is left out: %r", text[:2000])
        return None
