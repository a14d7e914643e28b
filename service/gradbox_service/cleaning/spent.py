"""What an owner's files are that only jobs which have ended needed, so that they go first.

    a blob      a job that is done named it, and nobody has sent it or asked for it since
    a result    its owner has fetched all of it, and no job goes on from it

A forward job that no gradient job has gone on from may still be: until it did, or for a quarter of
an hour, the blobs and the result of that job are not spent. Nor are the results of jobs that give
rows for every sample, which `against` may name. What is older than that quarter goes by its last
use (`expiry`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gradbox.protocol import JobState
from gradbox_service.cleaning.expiry import SETTLED_SPARED_S
from gradbox_service.cleaning.needed import Needed
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.jobs.records import Mark

PAGE: Final = 200
# Of an owner's jobs; what only earlier ones needed goes by its last use.
MAX_JOBS: Final = 2000
# Computations from whose result no job goes on.
ENDS: Final = frozenset({"gradient", "mixed_gradient"})


@dataclass(frozen=True)
class Spent:
    """What may go at once.

    Attributes:
        blobs: digest → when the last job that needed the blob ended; used since, it is not spent.
        results: the jobs whose results may go, those that were fetched.
    """

    blobs: Mapping[str, float]
    results: Sequence[JobRecord]


def spent(owner: str, records: Records, needed: Needed, *, now_s: float) -> Spent:
    """Return what only the jobs of an owner needed that have ended within a quarter of an hour."""
    done = {record.id: record for record in _lately_done(owner, records, since_s=now_s)}
    named = needed.by_job(done)
    gone_on_from = frozenset[str]().union(*named.values())
    blobs: dict[str, float] = {}
    kept: set[str] = set()
    results = []
    for record in done.values():
        names = named[record.id]
        if record.computation == "forward" and record.id not in gone_on_from:
            kept |= names
            continue
        if record.computation in ENDS or record.computation == "forward":
            results.append(record)
        for name in names - done.keys():
            blobs[name] = max(blobs.get(name, 0.0), record.finished_s or 0.0)
    return Spent({name: at for name, at in blobs.items() if name not in kept}, results)


def _lately_done(owner: str, records: Records, *, since_s: float) -> Iterator[JobRecord]:
    """Give jobs that are done, newest first."""
    after = None
    for _ in range(MAX_JOBS // PAGE):
        page = records.owned(owner, state=JobState.DONE, limit=PAGE, after=after)
        yield from (r for r in page if since_s - (r.finished_s or 0.0) <= SETTLED_SPARED_S)
        if len(page) < PAGE or since_s - page[-1].created_s > SETTLED_SPARED_S:
            return
        after = Mark(page[-1].created_s, page[-1].id)
