"""Which jobs a store lists, in which order, whatever comes and goes meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
import redis

from gradbox.protocol import JobState
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord, Mark, Records
from gradbox_service.jobs.records import PAGE
from tests.service.boxes import a_record, a_spec, begin


@pytest.fixture
def records(backing: Backing) -> Records:
    return backing.records


def test_owned_jobs_come_newest_first_and_by_state(records: Records) -> None:
    for number in range(5):
        records.create(a_record(f"job{number}", created_s=float(number)), spec=a_spec())
    records.create(a_record("other", owner="bob"), spec=a_spec())
    begin(records, "job1")
    assert [r.id for r in records.owned("ann")] == ["job4", "job3", "job2", "job1", "job0"]
    assert [r.id for r in records.owned("ann", limit=2)] == ["job4", "job3"]
    assert [r.id for r in records.owned("ann", state=JobState.RUNNING)] == ["job1"]


def test_an_owners_jobs_are_counted_and_come_oldest_first(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox_service.jobs.records.PAGE", 2)
    for number in (2, 0, 1):
        records.create(a_record(f"job{number}", created_s=float(number)), spec=a_spec())
    records.create(a_record("other", owner="bob"), spec=a_spec())
    records.create(a_record("gone", owner="eve"), spec=a_spec())
    records.update("gone", partial(JobRecord.request_cancel, now_s=9.0))
    records.forget("gone")
    assert [record.id for record in records.oldest("ann")] == ["job0", "job1", "job2"]
    assert list(records.oldest("nobody")) == []
    assert dict(records.num_by_owner()) == {"ann": 3, "bob": 1}


def test_jobs_come_in_pages_whatever_goes_meanwhile(records: Records) -> None:
    for number in range(5):  # two of one time
        record = a_record(f"job{number}", created_s=float(number // 2))
        records.create(record, spec=a_spec())
    first = records.owned("ann", limit=2)
    assert [record.id for record in first] == ["job4", "job3"]
    records.update("job3", partial(JobRecord.request_cancel, now_s=9.0))
    records.forget("job3")
    after = Mark(first[-1].created_s, first[-1].id)
    assert [record.id for record in records.owned("ann", after=after)] == ["job2", "job1", "job0"]


@pytest.mark.parametrize("meanwhile", ["some come", "some end"])
def test_a_list_has_each_job_once_whatever_happens_between_its_pages(
    connection: redis.Redis, meanwhile: str
) -> None:
    records = Records(connection)
    ids = [f"job{number}" for number in range(PAGE + 20)]
    for number, job_id in enumerate(ids):
        records.create(a_record(job_id, created_s=float(number)), spec=a_spec())
    changed = ["new1", "new2"] if meanwhile == "some come" else ids[-2:]

    class Interrupted(Records):
        def _many(self, ids: list[bytes]) -> list[JobRecord]:
            found = super()._many(ids)
            while changed:
                record = a_record(changed.pop(), created_s=999.0)
                records.create(record, spec=a_spec())  # does nothing to those that are there
                if meanwhile == "some end":
                    records.update(record.id, partial(JobRecord.request_cancel, now_s=9.0))
            return found

    state = JobState.QUEUED if meanwhile == "some end" else None
    listed = Interrupted(connection).owned("ann", state=state, limit=500)
    assert [record.id for record in listed] == ids[::-1]


def test_jobs_are_listed_and_counted_by_state(records: Records) -> None:
    for job_id in ("a", "b", "c"):
        records.create(a_record(job_id), spec=a_spec())
    begin(records, "a")
    records.update("b", partial(JobRecord.request_cancel, now_s=9.0))
    found = {s: [r.id for r in records.owned("ann", state=s)] for s in JobState}
    assert {state: ids for state, ids in found.items() if ids} == {
        JobState.RUNNING: ["a"],
        JobState.CANCELLED: ["b"],
        JobState.QUEUED: ["c"],
    }
    assert records.num_active("ann") == 2
    assert set(records.active_ids()) == {"a", "c"}
