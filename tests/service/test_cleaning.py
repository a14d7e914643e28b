"""What expires, in which order, and that nothing goes that a job needs."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from gradbox.protocol import JobSpec, parse_spec
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.cleaning.expiry import SPARED_S, Limits, Stored, crowding, expired
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.jobs.records import Memory
from gradbox_service.settings import DAY_S, Settings
from tests.service.boxes import SHARDS, a_record, a_spec, begin, blob_of, finish, ones

NOW_S = 1000 * DAY_S
ROOMY = Limits(result_age_s=7 * DAY_S, blob_age_s=30 * DAY_S, total_bytes=1e18)


def stored(name: str, *, days: float, kind: Any = "result", owner: str = "ann") -> Stored:
    return Stored(kind, name, (owner,), 10, NOW_S - days * DAY_S)


def names(
    files: list[Stored], limits: Limits = ROOMY, *, needed: frozenset[str] = frozenset()
) -> list[str]:
    return [file.name for file in expired(files, limits, needed=needed, now_s=NOW_S)]


def test_results_go_after_a_week_and_blobs_after_a_month() -> None:
    files = [stored(f"r{days}", days=days) for days in (6, 8, 31)]
    files += [stored(f"b{days}", days=days, kind="blob") for days in (6, 8, 31)]
    assert names(files) == ["r31", "b31", "r8"]


def test_what_a_job_needs_stays_however_old_it_is() -> None:
    assert names([stored("a", days=99), stored("b", days=98)], needed=frozenset("a")) == ["b"]


def test_above_the_bound_what_was_used_least_lately_goes_first() -> None:
    files = [stored(name, days=days) for name, days in (("new", 1), ("old", 3), ("mid", 2))]
    bound = Limits(7 * DAY_S, 30 * DAY_S, total_bytes=20)
    assert names(files, bound) == ["old"]
    assert names(files, bound, needed=frozenset({"old"})) == ["mid"]


def test_what_was_just_used_is_spared_by_all_but_age() -> None:
    fresh = stored("fresh", days=0.5 * SPARED_S / DAY_S)
    full = Limits(7 * DAY_S, 30 * DAY_S, total_bytes=0)
    assert names([fresh], full) == []
    assert names([fresh], Limits(1.0, 1.0, total_bytes=1e18)) == ["fresh"]


def test_what_expires_by_age_makes_room_first() -> None:
    files = [stored("old", days=8), stored("new", days=1)]
    bound = Limits(7 * DAY_S, 30 * DAY_S, total_bytes=10)
    assert names(files, bound) == ["old"]


def test_of_too_many_blobs_the_least_recently_used_go() -> None:
    files = [stored(f"b{days}", days=days, kind="blob") for days in range(1, 6)]
    few = Limits(7 * DAY_S, 30 * DAY_S, total_bytes=1e18, num_blobs=2)
    assert names(files, few) == ["b5", "b4", "b3"]
    assert names([stored("fresh", days=0.0, kind="blob"), *files[:2]], few) == ["b2"]


QUARTER = 1 / 96  # of an hour, in days


def settled(name: str, *, quarters: float, owner: str = "ann") -> Stored:
    return replace(stored(name, days=quarters * QUARTER, owner=owner), settled=True)


def test_where_the_rest_is_not_enough_settled_files_go_after_a_quarter_of_an_hour() -> None:
    files = [settled(f"ann{n}", quarters=n) for n in (0.5, 1.5, 2.5)]
    files += [settled("bob", quarters=3.5, owner="bob"), stored("idle", days=1, owner="bob")]
    files += [stored("unread", days=3.5 * QUARTER)]
    for bound_bytes, gone in (
        (50, ["idle"]),
        (40, ["idle", "bob"]),
        (30, ["idle", "bob", "ann2.5"]),
        (0, ["idle", "bob", "ann2.5", "ann1.5"]),
    ):
        assert names(files, replace(ROOMY, total_bytes=bound_bytes)) == gone


def cleaner_of(box: Backing, data: Path, **settings: Any) -> Cleaner:
    return Cleaner(Settings(data=data, **settings), box)


def put_blob(box: Backing, *, owner: str = "ann", days: float = 0.0, size: int = 3) -> str:
    digest, data = blob_of({"x": ones(size), **SHARDS})
    box.blobs.put(digest, [data])
    box.owners.claim(owner, {digest: len(data)})
    age(box.blobs.path(digest), days=days)
    return digest


def put_result(box: Backing, job_id: str, *, days: float = 0.0, owner: str = "ann") -> Path:
    if box.records.get(job_id) is None:
        box.records.create(a_record(job_id, owner=owner), spec=a_spec())
    finish(box, job_id, attempt=begin(box.records, job_id).attempt, data=b"result")
    path = box.results.path(job_id, attempt=1)
    age(path, days=days)
    return path


def age(path: Path, *, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def test_old_files_go_with_what_the_box_knows_of_them(backing: Backing, tmp_path: Path) -> None:
    old, new = put_blob(backing, days=31, size=1), put_blob(backing, days=29, size=2)
    gone, kept = put_result(backing, "gone", days=8), put_result(backing, "kept", days=6)
    assert {file.name for file in cleaner_of(backing, tmp_path / "data").clean()} == {old, "gone"}
    assert (gone.exists(), kept.exists()) == (False, True)
    assert (backing.blobs.size_bytes(old), backing.owners.owns("ann", old)) == (None, False)
    assert backing.owners.owns("ann", new)
    record = backing.records.get("gone")
    assert record is not None
    assert record.result_gone_s is not None
    assert dict(backing.records.result_bytes()) == {"ann": 6}


def test_nothing_goes_that_an_active_job_needs(backing: Backing, tmp_path: Path) -> None:
    blob = put_blob(backing, days=99)
    weights = put_blob(backing, days=99, size=7)
    forward = put_result(backing, "f" * 32, days=99)
    other = put_blob(backing, days=99, size=9)
    spec = a_spec(
        inputs=[{"shards": [{"blob": blob, "prefix": "0/"}]}],
        weights={"layer.bias": {"blob": weights, "tensor": "x"}},
        loss={
            "kind": "cotangents",
            "forward": "f" * 32,
            "tensors": {"z": {"blob": blob, "tensor": "x"}},
        },
        loss_inputs={},
    )
    backing.records.create(a_record("waits"), spec=spec)
    cleaner = cleaner_of(backing, tmp_path / "data")
    assert [file.name for file in cleaner.clean()] == [other]
    assert forward.exists()
    backing.records.update("waits", partial(JobRecord.request_cancel, now_s=1.0))
    assert {file.name for file in cleaner.clean()} == {blob, weights, "f" * 32}


def test_whoever_looks_at_a_blob_keeps_it(backing: Backing, tmp_path: Path) -> None:
    digest = put_blob(backing, days=99)
    assert backing.blobs.size_bytes(digest)
    assert cleaner_of(backing, tmp_path / "data").clean() == []


def test_a_blob_used_since_it_was_chosen_stays(backing: Backing, tmp_path: Path) -> None:
    digest = put_blob(backing, days=99)
    cleaner = cleaner_of(backing, tmp_path / "data")
    chosen = list(cleaner.stored())
    assert backing.blobs.header(digest) is not None
    assert cleaner.remove(chosen) == []
    assert backing.blobs.header(digest) is not None
    assert cleaner.clean() == []


def test_a_result_used_since_it_was_chosen_stays(backing: Backing, tmp_path: Path) -> None:
    path = put_result(backing, "read", days=99)
    cleaner = cleaner_of(backing, tmp_path / "data")
    chosen = list(cleaner.stored())
    assert backing.results.touch("read", attempt=1)
    assert cleaner.remove(chosen) == []
    record = backing.records.get("read")
    assert path.exists()
    assert record is not None
    assert record.result_gone_s is None


def test_what_a_lost_attempt_left_goes_without_the_jobs_result(
    backing: Backing, tmp_path: Path
) -> None:
    backing.records.create(a_record("twice"), spec=a_spec())
    begin(backing.records, "twice")
    left = backing.results.path("twice", attempt=1)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"written, and the worker killed before the record said so")
    age(left, days=8)
    backing.records.update("twice", partial(JobRecord.requeue, attempt=1, reason="", now_s=1.0))
    finish(backing, "twice", attempt=begin(backing.records, "twice").attempt, data=b"result")
    assert len(cleaner_of(backing, tmp_path / "data").clean()) == 1
    record = backing.records.get("twice")
    assert (left.exists(), backing.results.path("twice", attempt=2).exists()) == (False, True)
    assert record is not None
    assert record.result_gone_s is None


def test_what_somebody_removed_by_hand_counts_no_more(backing: Backing, tmp_path: Path) -> None:
    gone, kept = put_blob(backing, size=1), put_blob(backing, size=2)
    result, other = put_result(backing, "gone"), put_result(backing, "kept")
    other.with_name("nobodys.1.safetensors").write_bytes(b"x")
    cleaner = cleaner_of(backing, tmp_path / "data")
    backing.blobs.path(gone).unlink()
    result.unlink()
    assert cleaner.clean() == []
    record = backing.records.get("gone")
    assert record is not None
    assert record.result_gone_s is not None
    assert dict(backing.records.result_bytes()) == {"ann": 6}
    assert list(backing.owners.owners()) == [kept]
    assert dict(backing.owners.totals()) == {"ann": backing.blobs.size_bytes(kept)}


def test_a_folder_that_is_not_there_has_lost_nothing(backing: Backing, tmp_path: Path) -> None:
    put_blob(backing)
    result = put_result(backing, "away")
    for folder in (result.parent, backing.blobs.room.folder):
        folder.rename(folder.with_name(f"{folder.name}-away"))
    cleaner_of(backing, tmp_path / "data").clean()
    assert dict(backing.records.result_bytes()) == {"ann": 6}
    assert len(backing.owners.totals()) == 1


def test_the_bound_is_a_share_of_the_room_there_is(backing: Backing, tmp_path: Path) -> None:
    for size in (1, 2, 3):
        put_blob(backing, days=size, size=size)
    assert cleaner_of(backing, tmp_path / "data").clean() == []
    cleaner = cleaner_of(backing, tmp_path / "data", storage_share=1e-12)
    assert len(cleaner.clean()) == 3


def ended(
    box: Backing, job_id: str, *, quarters: float, read: bool = True, owner: str = "ann"
) -> None:
    """Have a job that ended so many quarters of an hour ago, and was read shortly after."""
    put_result(box, job_id, owner=owner, days=(quarters + (-0.01 if read else 0.01)) * QUARTER)
    finished_s = time.time() - quarters * QUARTER * DAY_S
    box.records.update(job_id, lambda record: replace(record, finished_s=finished_s))


def test_a_full_disk_takes_what_was_read_and_blobs_before_the_hour(
    backing: Backing, tmp_path: Path
) -> None:
    ended(backing, "read", quarters=1.5)
    ended(backing, "unread", quarters=1.5, read=False)
    ended(backing, "new", quarters=0.5)
    blob = put_blob(backing, days=1.5 * QUARTER)
    cleaner = cleaner_of(backing, tmp_path / "data", storage_share=1e-12)
    assert {file.name for file in cleaner.clean()} == {"read", blob}
    assert {file.name for file in cleaner.stored()} == {"unread", "new"}


def done(
    box: Backing,
    job_id: str,
    *,
    blobs: list[str],
    owner: str = "ann",
    size: int = 0,
    ago_s: int = 0,
) -> None:
    """Run a job that names blobs, whose result, of so many bytes, its owner fetches.

    Its files were last used `ago_s` seconds ago.
    """
    shards = [{"blob": blob, "prefix": "0/"} for blob in blobs]
    spec = a_spec(inputs=[{"shards": shards}], loss_inputs={})
    box.records.create(a_record(job_id, owner=owner, created_s=time.time()), spec=spec)
    finish(box, job_id, attempt=begin(box.records, job_id).attempt, data=b"x" * size)
    box.results.note_fetched(job_id, attempt=1)
    for path in (box.results.path(job_id, attempt=1), *map(box.blobs.path, blobs)):
        age(path, days=ago_s / DAY_S)


def left(box: Backing, cleaner: Cleaner) -> set[str]:
    return {file.name for file in cleaner.stored()}


def test_what_only_ended_jobs_needed_makes_room_at_once(backing: Backing, tmp_path: Path) -> None:
    old, new = put_blob(backing, size=1000), put_blob(backing, size=1001)
    shared, about_to_be_named = put_blob(backing, size=1002), put_blob(backing, size=1003)
    done(backing, "first", blobs=[old, shared], size=5000, ago_s=2)
    done(backing, "second", blobs=[new, shared], ago_s=1)
    unread = put_result(backing, "unread")
    assert backing.blobs.size_bytes(shared)  # asked for, so that a job is about to name it
    cleaner = cleaner_of(backing, tmp_path / "data")
    assert cleaner.make_room("ann", 6000) == 0.0
    assert left(backing, cleaner) == {new, shared, about_to_be_named, "second", "unread"}
    assert cleaner.make_room("ann", 10**6) > 0.0
    assert left(backing, cleaner) == {shared, about_to_be_named, "unread"}
    assert unread.exists()


def test_what_a_job_needs_makes_no_room(backing: Backing, tmp_path: Path) -> None:
    blob, named = put_blob(backing, size=1000), put_blob(backing, size=1001)
    done(backing, "first", blobs=[blob, named], ago_s=1)
    spec = a_spec(inputs=[{"shards": [{"blob": blob, "prefix": "0/"}]}], loss_inputs={})
    backing.records.create(a_record("waits"), spec=spec)
    cleaner = cleaner_of(backing, tmp_path / "data")
    keep = a_spec(inputs=[{"shards": [{"blob": named, "prefix": "0/"}]}], loss_inputs={})
    assert cleaner.make_room("ann", 10**6, keep=keep) > 0.0
    assert left(backing, cleaner) == {blob, named}
    assert cleaner.make_room("ann", 10**6) > 0.0
    assert left(backing, cleaner) == {blob}


def test_no_room_is_made_while_a_job_of_the_owner_is_being_posted(
    backing: Backing, tmp_path: Path
) -> None:
    for owner, size in (("ann", 1000), ("bob", 1001)):
        done(
            backing, owner, blobs=[put_blob(backing, owner=owner, size=size)], owner=owner, ago_s=1
        )
    cleaner = cleaner_of(backing, tmp_path / "data")
    with ThreadPoolExecutor(2) as pool:
        with cleaner.under_way.posting("ann"), cleaner.under_way.posting("ann"):
            waits = pool.submit(cleaner.make_room, "ann", 1)
            assert pool.submit(cleaner.make_room, "bob", 1).result(60.0) == 0.0
            time.sleep(0.05)
            assert not waits.done()
            assert backing.owners.totals()["ann"] > 0
        assert waits.result(60.0) == 0.0
    assert backing.owners.totals()["ann"] == 0


def test_a_forward_job_is_kept_until_a_gradient_job_went_on_from_it(
    backing: Backing, tmp_path: Path
) -> None:
    forward, blob = "f" * 32, put_blob(backing, size=1000)
    cleaner = cleaner_of(backing, tmp_path / "data")
    shards = [{"blob": blob, "prefix": "0/"}]
    plain = {"computation": "forward", "model": "tiny", "inputs": [{"shards": shards}]}
    backing.records.create(
        a_record(forward, computation="forward", created_s=time.time()),
        spec=parse_spec(plain),
    )
    finish(backing, forward, attempt=begin(backing.records, forward).attempt, data=b"outputs")
    backing.results.note_fetched(forward, attempt=1)
    assert cleaner.make_room("ann", 1) > 0.0
    backing.records.create(
        a_record("goes-on", created_s=time.time()), spec=continues(forward, blob=blob)
    )
    assert cleaner.make_room("ann", 1) > 0.0
    finish(backing, "goes-on", attempt=begin(backing.records, "goes-on").attempt, data=b"grads")
    assert cleaner.make_room("ann", 10**6) > 0.0
    assert left(backing, cleaner) == {"goes-on"}


def test_a_blob_that_is_anothers_too_stays_theirs(backing: Backing, tmp_path: Path) -> None:
    blob = put_blob(backing, size=1000)
    size_bytes = backing.blobs.path(blob).stat().st_size
    backing.owners.claim("bob", {blob: size_bytes})
    done(backing, "first", blobs=[blob], ago_s=1)
    assert cleaner_of(backing, tmp_path / "data").make_room("ann", 1) == 0.0
    assert dict(backing.owners.totals()) == {"bob": size_bytes}
    assert backing.blobs.header(blob) is not None


def test_the_quota_takes_what_was_not_used_lately_from_its_owner_alone(
    backing: Backing, tmp_path: Path
) -> None:
    ended(backing, "read", quarters=1.5)
    ended(backing, "unread", quarters=3.5, read=False)
    ended(backing, "older", quarters=4.5, read=False)
    ended(backing, "bob", quarters=9.5, owner="bob")
    blob = put_blob(backing, days=2.5 * QUARTER)
    cleaner = cleaner_of(backing, tmp_path / "data")
    assert cleaner.make_room("ann", 1) == 0.0
    assert left(backing, cleaner) == {"read", "unread", "older", "bob"}
    assert blob not in backing.owners.owners()
    soon_s = cleaner.make_room("ann", 18)
    assert left(backing, cleaner) == {"unread", "bob"}
    assert soon_s == pytest.approx(0.5 * QUARTER * DAY_S, abs=30)


def test_an_owner_whose_results_exceed_the_quota_is_brought_below_it(
    backing: Backing, tmp_path: Path
) -> None:
    for n in range(4):
        ended(backing, f"read{n}", quarters=1.5 + n)
    cleaner = cleaner_of(backing, tmp_path / "data", owner_quota_bytes=13)
    cleaner.clean()
    assert left(backing, cleaner) == {"read0", "read1"}


def test_a_full_disk_takes_first_what_only_ended_jobs_needed(
    backing: Backing, tmp_path: Path
) -> None:
    blob, unused = put_blob(backing, size=1000), put_blob(backing, size=10)
    done(backing, "first", blobs=[blob], size=1000, ago_s=1)
    cleaner = cleaner_of(backing, tmp_path / "data", storage_share=1e-12)
    cleaner.clean()
    assert left(backing, cleaner) == {unused}


def test_a_full_redis_forgets_old_jobs_of_whoever_has_most(
    redis_settings: Settings, connection: redis.Redis
) -> None:
    box = Backing.on_redis(redis_settings)
    for n in range(6):
        ended(box, f"ann{n}", quarters=1.5)
    ended(box, "ann-new", quarters=0.5)
    ended(box, "ann-unread", quarters=3.5, read=False)
    ended(box, "ann-old", quarters=4.5, read=False)
    box.records.create(a_record("ann-waits"), spec=a_spec())
    ended(box, "bob", quarters=99, owner="bob")
    cleaner = cleaner_of(box, redis_settings.data)
    cleaner.clean()
    assert len(box.records.owned("ann")) == 10
    used = connection.info("memory")["used_memory"]
    connection.config_set("maxmemory", int(1.3 * used))
    try:
        for _ in range(20):
            cleaner.clean()
    finally:
        connection.config_set("maxmemory", 0)
    left = {record.id for record in box.records.owned("ann")}
    assert left == {"ann-new", "ann-unread", "ann-waits"}
    assert [record.id for record in box.records.owned("bob")] == ["bob"]
    assert not box.results.path("ann0", attempt=1).exists()


def continues(forward: str, *, blob: str) -> JobSpec:
    """Return the spec of a job that reads another one's result."""
    return a_spec(
        inputs=[{"shards": [{"blob": blob, "prefix": "0/"}]}],
        loss={
            "kind": "cotangents",
            "forward": forward,
            "tensors": {"z": {"blob": blob, "tensor": "x"}},
        },
        loss_inputs={},
    )


@pytest.mark.parametrize("why", ["age", "memory"])
def test_no_job_is_forgotten_whose_result_another_one_is_to_read(
    why: str, redis_settings: Settings, connection: redis.Redis
) -> None:
    box = Backing.on_redis(redis_settings)
    for job_id in ("f" * 32, "other"):
        ended(box, job_id, quarters=99)
    box.records.create(a_record("waits"), spec=continues("f" * 32, blob=put_blob(box)))
    used = connection.info("memory")["used_memory"]
    connection.config_set("maxmemory", int(1.3 * used) if why == "memory" else 0)
    settings = {"record_age_s": 0.001} if why == "age" else {}
    time.sleep(0.01)
    try:
        for _ in range(20):
            cleaner_of(box, redis_settings.data, **settings).clean()
    finally:
        connection.config_set("maxmemory", 0)
    assert {record.id for record in box.records.owned("ann")} == {"f" * 32, "waits"}
    assert box.results.path("f" * 32, attempt=1).exists()


def test_as_many_jobs_are_forgotten_as_make_the_room(backing: Backing) -> None:
    for n in range(20):
        owner = "ann" if n < 15 else "bob"
        backing.records.create(a_record(f"{n:02}", owner=owner, created_s=float(n)), spec=a_spec())
    used = Memory(used_bytes=1000, bound_bytes=1250)  # 50 a job; the share is 750
    chosen = crowding(KnownMemory(backing.records, used), may_go=lambda record: True)
    assert chosen == ["00", "01", "02", "03", "04"]
    odd = crowding(KnownMemory(backing.records, used), may_go=lambda r: int(r.id) % 2 == 1)
    assert odd == ["01", "03", "05", "07", "09"]
    for enough in (Memory(700, 1250), Memory(10**12, None)):
        assert not crowding(KnownMemory(backing.records, enough), may_go=lambda record: True)


class KnownMemory:
    """Records of a store that takes so much memory."""

    def __init__(self, records: Records, memory: Memory) -> None:
        self._records = records
        self.memory = lambda: memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)


def test_records_end_after_their_time_with_all_that_is_stored(
    backing: Backing, tmp_path: Path
) -> None:
    result = put_result(backing, "old")
    put_result(backing, "new")
    backing.records.create(a_record("waits"), spec=a_spec())
    backing.records.update("new", lambda record: record.drop_result(now_s=time.time()))
    cleaner_of(backing, tmp_path / "data").clean()
    assert backing.records.get("old") is not None
    time.sleep(0.01)
    cleaner_of(backing, tmp_path / "data", record_age_s=0.001).clean()
    assert backing.records.get("old") is None
    assert backing.records.spec("old") is None
    assert backing.records.events("old") == []
    assert not result.exists()
    assert dict(backing.records.result_bytes()) == {}
    assert [record.id for record in backing.records.owned("ann")] == ["waits"]
    assert [record.id for record in backing.records.active()] == ["waits"]


def test_an_ended_record_leaves_no_key(
    connection: Any, redis_settings: Settings, tmp_path: Path
) -> None:
    box = Backing.on_redis(redis_settings)
    put_result(box, "old")
    time.sleep(0.01)
    connection.delete("gradbox:lease:old:1")
    cleaner_of(box, redis_settings.data, record_age_s=0.001).clean()
    box.usage.add_up()
    lasting = [key for key in connection.scan_iter() if connection.ttl(key) < 0]  # but use
    # The names of those who ever posted a job stay: one for each person.
    assert set(lasting) - {RESULT_BYTES, ADDED_UP} == {b"gradbox:changes", b"gradbox:owners"}


RESULT_BYTES = b"gradbox:result-bytes"
ADDED_UP = b"gradbox:charges:added-up"


def test_half_written_results_go_unless_their_attempt_runs(
    backing: Backing, tmp_path: Path
) -> None:
    backing.records.create(a_record("runs"), spec=a_spec())
    begin(backing.records, "runs")
    for job_id in ("runs", "dead"):
        path = backing.results.partial_path(job_id, attempt=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        age(path, days=1)
    cleaner_of(backing, tmp_path / "data").clean()
    assert backing.results.partial_path("runs", attempt=1).exists()
    assert not backing.results.partial_path("dead", attempt=1).exists()


def test_the_running_cleaner_goes_on_after_a_failure(
    backing: Backing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaner = cleaner_of(backing, tmp_path / "data", clean_every_s=0.01)
    failed = threading.Event()

    def fail(**_: Any) -> None:
        failed.set()
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(backing.records, "ended", fail)
        cleaner.start()
        assert failed.wait(60.0)
    result = put_result(backing, "old", days=8)
    give_up = time.monotonic() + 60.0
    while result.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    cleaner.close()
    cleaner.join()


def test_checkpoints_go_with_their_job_alone(backing: Backing, tmp_path: Path) -> None:
    put_result(backing, "ended")
    backing.records.create(a_record("runs"), spec=a_spec())
    folder = tmp_path / "data" / "checkpoints"
    folder.mkdir(parents=True)
    for job_id in ("ended", "runs", "unknown"):
        (folder / f"{job_id}.safetensors").write_bytes(b"x")
        age(folder / f"{job_id}.safetensors", days=1)
    cleaner_of(backing, tmp_path / "data").clean()
    assert [path.stem for path in folder.iterdir()] == ["runs"]
