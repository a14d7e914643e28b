"""800 drawn calls of a box: what must hold of every box holds after each of them."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import redis

from gradbox.protocol import JobState
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord, changes
from gradbox_service.settings import Settings
from tests.service.conftest import serve
from tests.service.drawn_calls import USERS, Asked, draw

NUM_CALLS = 200


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_a_box_stays_whole_whatever_it_is_asked(
    redis_settings: Settings, connection: redis.Redis, seed: int
) -> None:
    limits = {"max_queued_jobs": 4, "owner_quota_bytes": 2000, "disk_reserve_bytes": 0}
    settings = redis_settings.model_copy(update={**limits, "requests_per_s": 100_000})
    rng = random.Random(seed)
    ended: dict[str, JobRecord] = {}
    for box in serve(Backing.on_redis(settings), settings):
        asked = Asked(box, settings)
        for _ in range(NUM_CALLS):
            draw(rng, len(asked.ids))(asked)
            check_records(asked, ended)
            check_files(asked)
            check_indices(connection)


def check_records(asked: Asked, ended: dict[str, JobRecord]) -> None:
    """A job has one end, which its last event tells and nothing changes."""
    records = asked.box.backing.records
    found = records.many(asked.ids)
    forgotten = set(asked.ids) - {record.id for record in found}
    assert forgotten <= ended.keys()
    for record in found:
        events = records.events(record.id)
        states = [json.loads(event.data)["state"] for event in events if event.kind == "state"]
        assert (states[0], states[-1]) == ("queued", record.state)
        finals = [event.final for event in events]
        assert sum(finals) == finals[-1] == record.state.final
        if record.id in ended:
            before = ended[record.id]
            assert record in (before, before.drop_result(now_s=record.result_gone_s or 0.0))
        elif record.state.final:
            ended[record.id] = record
    active = [record for record in found if not record.state.final]
    assert list(records.active()) == active
    for user in USERS:
        assert records.num_active(user) == sum(record.owner == user for record in active)


def check_files(asked: Asked) -> None:
    """What each owner is said to have on disk is there, and nothing else."""
    backing, results, blobs = asked.box.backing, Counter[str](), Counter[str]()
    for job_id, file in backing.results.files():
        record = backing.records.get(job_id)
        assert record is not None
        results[record.owner] += file.size_bytes
    for digest, file in backing.blobs.files():
        for owner in backing.owners.owners_of(digest):
            blobs[owner] += file.size_bytes
    assert dict(backing.records.result_bytes()) == dict(results)
    assert dict(backing.owners.totals()) == dict(blobs)


def check_indices(connection: redis.Redis) -> None:
    """Redis holds each record in the indices of its owner and its state, and in no other."""
    expected: dict[str, dict[bytes, float]] = {}
    for key in connection.keys("gradbox:job:*"):
        record = JobRecord.from_json(connection.get(key))
        for index in (
            changes.owner_key(record.owner),
            changes.index_key(record.owner, record.state),
        ):
            if index is not None:
                expected.setdefault(index, {})[record.id.encode()] = record.created_s
    kinds = ("owner:*", "active*", *(f"{state}:*" for state in JobState if state.final))
    found = [key for kind in kinds for key in connection.keys(f"gradbox:{kind}")]
    indices = {key.decode(): dict(connection.zrange(key, 0, -1, withscores=True)) for key in found}
    assert indices == expected
