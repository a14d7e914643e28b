"""All that a service stands on, so that it can be handed in as one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gradbox_service.accounting.blob_owners import BlobOwners
from gradbox_service.accounting.usage import Usage
from gradbox_service.database.connection import connect
from gradbox_service.database.leadership import Leadership
from gradbox_service.fleet.operation import Operation
from gradbox_service.fleet.workers import Fleet
from gradbox_service.identity.sessions import Sessions
from gradbox_service.identity.tokens import Tokens
from gradbox_service.jobs.records import Records
from gradbox_service.jobs.turns import Turns
from gradbox_service.runs.files import RunFiles
from gradbox_service.runs.records import Runs
from gradbox_service.settings import BadSettings, Settings
from gradbox_service.store import BlobStore, ResultStore
from gradbox_service.stores import Stores


@dataclass(frozen=True)
class Backing:
    """Records, use, turns, fleet, mode, tokens, sessions, lock, files, owners, runs, stores."""

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
    runs: Runs
    run_files: RunFiles
    stores: Stores

    def taken(self) -> dict[str, Counter[str]]:
        """Return what blobs, results, runs and stores take: kind → owner → bytes."""
        return {
            "blob": self.owners.totals(),
            "result": self.records.result_bytes(),
            "run": self.runs.totals(),
            "store": self.stores.totals(),
        }

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
        tokens = Tokens(connection)
        return cls(
            records=Records(connection),
            usage=Usage(connection),
            turns=Turns(connection),
            fleet=Fleet(connection),
            operation=Operation(connection),
            tokens=tokens,
            sessions=Sessions(connection, tokens=tokens),
            leadership=Leadership(connection),
            blobs=BlobStore(
                settings.data, connection=connection, reserve_bytes=settings.disk_reserve_bytes
            ),
            results=ResultStore(
                settings.data, connection=connection, reserve_bytes=settings.disk_reserve_bytes
            ),
            owners=BlobOwners(connection),
            runs=Runs(connection),
            run_files=RunFiles(settings.data / "runs"),
            stores=Stores(connection, settings.data),
        )
