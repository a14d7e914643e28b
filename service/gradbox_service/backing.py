"""All that a service stands on, so that it can be handed in as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradbox_service.accounting.blob_owners import BlobOwners, MemoryBlobOwners, RedisBlobOwners
from gradbox_service.accounting.usage import RedisUsage, Usage
from gradbox_service.database.connection import connect
from gradbox_service.fleet.operation import MemoryOperation, Operation, RedisOperation
from gradbox_service.fleet.workers import Fleet, MemoryFleet, RedisFleet
from gradbox_service.identity.revocations import Revocations
from gradbox_service.identity.sessions import MemorySessions, RedisSessions, Sessions
from gradbox_service.identity.tokens import MemoryTokens, RedisTokens, Tokens
from gradbox_service.jobs.memory_records import MemoryRecords
from gradbox_service.jobs.records import Records
from gradbox_service.jobs.redis_records import RedisRecords
from gradbox_service.jobs.turns import MemoryTurns, RqTurns, Turns
from gradbox_service.queue.leadership import Leadership, RedisLeadership, SoleLeadership
from gradbox_service.settings import BadSettings, Settings
from gradbox_service.store import BlobStore, ResultStore, blob_store, result_store


@dataclass(frozen=True)
class Backing:
    """Records, use, turns, fleet, mode, tokens, sessions, lock, files, owners."""

    records: Records
    usage: Usage
    turns: Turns
    fleet: Fleet
    operation: Operation
    tokens: Tokens
    sessions: Sessions
    leadership: Leadership
    blobs: BlobStore
    results: ResultStore
    owners: BlobOwners

    @classmethod
    def on_redis(cls, settings: Settings) -> Backing:
        """Return the backing of a real box; nothing is sent before the first use.

        Raises:
            BadSettings: no Redis was named, or what was named is no address.
        """
        if not settings.redis_url:
            raise BadSettings(
                "the service needs a Redis: give --redis-url or GRADBOX_REDIS_URL "
                "(`gradbox up` brings its own)"
            )
        connection = connect(settings.redis_url)
        tokens = RedisTokens(connection, revocations=Revocations(settings.data))
        return cls(
            records=RedisRecords(connection),
            usage=RedisUsage(connection),
            turns=RqTurns(connection),
            fleet=RedisFleet(connection),
            operation=RedisOperation(connection),
            tokens=tokens,
            sessions=RedisSessions(connection, tokens=tokens),
            leadership=RedisLeadership(connection),
            blobs=blob_store(settings.data, reserve_bytes=settings.disk_reserve_bytes),
            results=result_store(settings.data, reserve_bytes=settings.disk_reserve_bytes),
            owners=RedisBlobOwners(connection),
        )

    @classmethod
    def in_memory(cls, data: Path, *, settings: Settings | None = None) -> Backing:
        """Return the backing of a box inside one process; files are under `data`."""
        reserve_bytes = None if settings is None else settings.disk_reserve_bytes
        records, tokens = MemoryRecords(), MemoryTokens()
        return cls(
            records=records,
            usage=records.usage,
            turns=MemoryTurns(),
            fleet=MemoryFleet(),
            operation=MemoryOperation(),
            tokens=tokens,
            sessions=MemorySessions(tokens=tokens),
            leadership=SoleLeadership(),
            blobs=blob_store(data, reserve_bytes=reserve_bytes),
            results=result_store(data, reserve_bytes=reserve_bytes),
            owners=MemoryBlobOwners(),
        )
