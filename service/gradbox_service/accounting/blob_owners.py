"""Whose blobs are whose.

A blob is stored once, and belongs to every owner who has sent all of its bytes: knowing a digest
is not having the bytes. To everybody else the box answers as if the blob were not there. Its size
counts against the owner who sent it first.

    gradbox:blob:DIGEST      hash: `first` (owner), `size_bytes`, and `owner:NAME` for each owner
    gradbox:blobs-of:OWNER   set of the digests of the blobs that belong to them
    gradbox:blob-bytes       hash: owner → bytes of the blobs that they sent first
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import redis
from redis.client import Pipeline

from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_service.database.conditional_commands import IF_ONE, OVER_BOUND, ConditionalCommands
from gradbox_service.store import BlobStore

BYTES = "gradbox:blob-bytes"
FIRST = b"first"
OWNER = b"owner:"
# KEYS: the sums, the owner's blobs, the blob; ARGV: the owner, their field, the digest. It counts
# against the next owner then; 1 if there is none.
RELEASE = (
    OVER_BOUND
    + """
redis.call('SREM', KEYS[2], ARGV[3])
local released = redis.call('HDEL', KEYS[3], ARGV[2])
local first, size = unpack(redis.call('HMGET', KEYS[3], 'first', 'size_bytes'))
if released == 1 and first == ARGV[1] then redis.call('HINCRBY', KEYS[1], first, -size) end
for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
    if string.sub(field, 1, 6) == 'owner:' then
        if first == ARGV[1] then
            redis.call('HSET', KEYS[3], 'first', string.sub(field, 7))
            redis.call('HINCRBY', KEYS[1], string.sub(field, 7), size)
        end
        return 0
    end
end
redis.call('DEL', KEYS[3])
return 1
"""
)
# Digests asked about in one round trip.
ASKED_AT_ONCE = 1000


class BlobOwners:
    """Who has sent the bytes of which blob: one hash a blob, and one of sums.

    Safe to call from several processes at once.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
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
        pipe.sadd(_list_key(owner), *sizes_bytes)
        for digest, size_bytes in sizes_bytes.items():
            key = _key(digest)
            pipe.hsetnx(key, FIRST.decode(), owner)
            if_first = f"{IF_ONE}HINCRBY"
            pipe.execute_command(if_first, BYTES, owner, size_bytes)  # type: ignore[no-untyped-call]
            fields: dict[Any, Any] = {"size_bytes": size_bytes, _field(owner): 1}
            pipe.hset(key, mapping=fields)

    def owns(self, owner: str, digest: str) -> bool:
        """Return whether `owner` has sent the blob's bytes."""
        return bool(self._redis.hexists(_key(digest), _field(owner)))

    def owned_among(self, owner: str, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` whose bytes `owner` has sent."""
        asked, found = list(digests), list[str]()
        for start in range(0, len(asked), ASKED_AT_ONCE):
            some = asked[start : start + ASKED_AT_ONCE]
            with self._redis.pipeline(transaction=False) as pipe:
                for digest in some:
                    pipe.hexists(_key(digest), _field(owner))
                found += [d for d, owned in zip(some, pipe.execute(), strict=True) if owned]
        return frozenset(found)

    def owners_of(self, digest: str) -> Sequence[str]:
        """Return the blob's owners, the one it counts against first; empty for an unknown blob."""
        fields = cast("dict[bytes, bytes]", self._redis.hgetall(_key(digest)))
        names = [name[len(OWNER) :].decode() for name in fields if name.startswith(OWNER)]
        first = fields.get(FIRST, b"").decode()
        return sorted(names, key=lambda name: (name != first, name))

    def firsts(self, digests: Sequence[str]) -> Mapping[str, str]:
        """Return the owners that blobs count against; without those of unknown blobs."""
        with self._redis.pipeline(transaction=False) as pipe:
            for digest in digests:
                pipe.hget(_key(digest), FIRST.decode())
            found = zip(digests, pipe.execute(), strict=True)
            return {digest: first.decode() for digest, first in found if first is not None}

    def bytes_of(self, owner: str) -> int:
        """Return the bytes of the blobs that `owner` sent before anybody else did."""
        return int(cast("bytes | None", self._redis.hget(BYTES, owner)) or 0)

    def totals(self) -> Mapping[str, int]:
        """Return `bytes_of` for every owner who has any."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(BYTES))
        return {owner.decode(): int(size) for owner, size in found.items() if int(size)}

    def known(self) -> Iterator[str]:
        """Give the digest of every blob that belongs to somebody."""
        for key in self._redis.scan_iter(match=_key("*"), count=ASKED_AT_ONCE):
            yield cast(bytes, key).decode().removeprefix(_key(""))

    def blobs_of(self, owner: str) -> Collection[str]:
        """Return the digests of all blobs that belong to `owner`."""
        found = cast("set[bytes]", self._redis.smembers(_list_key(owner)))
        return {digest.decode() for digest in found}

    def release(self, owner: str, digest: str) -> bool:
        """Note that the blob is no longer `owner`'s; return whether it belongs to nobody now.

        It then counts against another owner, if there is one. Call it before the file is removed. A
        claim in between is of bytes that are written anew.
        """
        keys = [BYTES, _list_key(owner), _key(digest)]
        return bool(self._release(keys=keys, args=[owner, _field(owner), digest]))

    def forget(self, digest: str) -> None:
        """Note that the blob is no longer stored: release it of all its owners."""
        for owner in self.owners_of(digest):
            self.release(owner, digest)


def _key(digest: str) -> str:
    return f"gradbox:blob:{digest}"


def _list_key(owner: str) -> str:
    return f"gradbox:blobs-of:{owner}"


def _field(owner: str) -> bytes:
    return OWNER + owner.encode()


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
