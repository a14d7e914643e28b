"""Whose blobs are whose.

A blob is stored once, and belongs to every owner who has sent all of its bytes: knowing a digest
is not having the bytes. To everybody else the box answers as if the blob were not there. Its size
counts against each of its owners.

    gradbox:own-blobs:OWNER   hash: digest → size, of the blobs that belong to them
    gradbox:own-blob-bytes    hash: owner → the sum of those sizes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import redis
from redis.client import Pipeline

from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.database.conditional_commands import IF_ONE, OVER_BOUND, ConditionalCommands
from gradbox_service.database.owned import OwnedBytes
from gradbox_service.store import BlobStore

BYTES = "gradbox:own-blob-bytes"
BLOBS_OF = "gradbox:own-blobs:"
# KEYS: the sums, the owner's blobs; ARGV: the owner, the digest, how keys of owners' blobs begin.
# It answers 1 if no owner is left.
RELEASE = (
    OVER_BOUND
    + """
local size = redis.call('HGET', KEYS[2], ARGV[2])
if size then
    redis.call('HDEL', KEYS[2], ARGV[2])
    redis.call('HINCRBY', KEYS[1], ARGV[1], -size)
end
for _, owner in ipairs(redis.call('HKEYS', KEYS[1])) do
    if redis.call('HEXISTS', ARGV[3] .. owner, ARGV[2]) == 1 then return 0 end
end
return 1
"""
)
# Digests asked about in one round trip.
ASKED_AT_ONCE = 1000


class BlobOwners:
    """Who has sent the bytes of which blob: one hash an owner, and one of sums.

    Safe to call from several processes at once.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._bytes = OwnedBytes(connection, BYTES)
        self._commands = ConditionalCommands(connection)
        self._release = connection.register_script(RELEASE)

    def claim(self, owner: str, sizes_bytes: Mapping[str, int]) -> None:
        """Note that `owner` has sent all bytes of blobs that are in their place; may be repeated.

        Args:
            sizes_bytes: by their digests.
        """
        pipe = self._redis.pipeline()
        self.claim_by(pipe, owner, sizes_bytes)
        self._commands.run(pipe, where={})

    def claim_by(self, pipe: Pipeline, owner: str, sizes_bytes: Mapping[str, int]) -> None:
        """Do so by commands that are run together, see `ConditionalCommands`."""
        for digest, size_bytes in sizes_bytes.items():
            pipe.hset(_key(owner), digest, cast(Any, size_bytes))
            if_new = f"{IF_ONE}HINCRBY"
            pipe.execute_command(if_new, BYTES, owner, size_bytes)  # type: ignore[no-untyped-call]

    def owns(self, owner: str, digest: str) -> bool:
        """Return whether `owner` has sent the blob's bytes."""
        return bool(self._redis.hexists(_key(owner), digest))

    def owned_among(self, owner: str, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` whose bytes `owner` has sent."""
        asked, found = list(digests), list[str]()
        for start in range(0, len(asked), ASKED_AT_ONCE):
            some = asked[start : start + ASKED_AT_ONCE]
            sizes = self._redis.hmget(_key(owner), some)
            found += [digest for digest, size in zip(some, sizes, strict=True) if size is not None]
        return frozenset(found)

    def owners_of(self, digest: str) -> Sequence[str]:
        """Return the blob's owners by name; empty for an unknown blob."""
        return [owner for owner in sorted(self.totals()) if self.owns(owner, digest)]

    def owners(self) -> Mapping[str, Sequence[str]]:
        """Return the owners of every blob that belongs to somebody, by its digest."""
        found: dict[str, list[str]] = {}
        for owner in sorted(self.totals()):
            for digest in self.blobs_of(owner):
                found.setdefault(digest, []).append(owner)
        return found

    def sizes(self) -> Mapping[str, int]:
        """Return the size of every blob that belongs to somebody, by its digest."""
        found: dict[bytes, bytes] = {}
        for owner in self.totals():
            found |= cast("dict[bytes, bytes]", self._redis.hgetall(_key(owner)))
        return {digest.decode(): int(size) for digest, size in found.items()}

    def totals(self) -> Counter[str]:
        """Return the bytes of the blobs that belong to every owner who has any."""
        return self._bytes.totals()

    def blobs_of(self, owner: str) -> Collection[str]:
        """Return the digests of all blobs that belong to `owner`."""
        found = cast("list[bytes]", self._redis.hkeys(_key(owner)))
        return {digest.decode() for digest in found}

    def release(self, owner: str, digest: str) -> bool:
        """Note that the blob is no longer `owner`'s; return whether it belongs to nobody now.

        Call it before the file is removed. A claim in between is of bytes that are written anew.
        """
        return bool(self._release(keys=[BYTES, _key(owner)], args=[owner, digest, BLOBS_OF]))

    def forget(self, digest: str) -> None:
        """Note that the blob is no longer stored: release it of all its owners."""
        for owner in self.owners_of(digest):
            self.release(owner, digest)


def _key(owner: str) -> str:
    return f"{BLOBS_OF}{owner}"


class OwnBlobs:
    """The blobs whose bytes `owner` has sent."""

    def __init__(
        self,
        owner: str,
        *,
        blobs: BlobStore,
        owners: BlobOwners,
        sent: Mapping[str, SafetensorsHeader] | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            sent: blobs that came whole with this request, whether they are stored yet or not.
        """
        self._owner = owner
        self._blobs = blobs
        self._owners = owners
        self._sent = sent or {}

    def headers(self, digests: Collection[str]) -> dict[str, SafetensorsHeader]:
        """Return the headers of those blobs that are here."""
        sent = {digest: self._sent[digest] for digest in digests if digest in self._sent}
        asked = [digest for digest in digests if digest not in sent]
        if not asked:
            return sent
        return sent | self._blobs.headers(self._owners.owned_among(self._owner, asked))

    def size_bytes(self, digest: str) -> int | None:
        """Return the blob's size, or None if it is not here."""
        owned = self._owners.owns(self._owner, digest)
        return self._blobs.size_bytes(digest) if owned else None
