"""What jobs read, blobs and results they continue; and what only jobs needed that have ended.

The latter goes first:

    a blob      a job that is done named it, and nobody has sent it or asked for it since
    a result    its owner has fetched all of it, and no job goes on from it

What a run's steps read that may have to be made again is needed as if their jobs still ran.

A forward job that no gradient job has gone on from may still be: until it did, or for a quarter of
an hour, the blobs and the result of that job are not spent. Nor are the results of jobs that give
rows for every sample, which `against` may name. What is older than that quarter goes by its last
use (`expiry`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from gradbox.errors import GradboxError
from gradbox.protocol import JobState, names_in
from gradbox_service.cleaning.expiry import SETTLED_SPARED_S
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.jobs.records import Mark
from gradbox_service.runs import Runs

# Names that are remembered, of all jobs together: about 60 MB.
REMEMBERED: Final = 500_000
PAGE: Final = 200
# Of an owner's jobs; what only earlier ones needed goes by its last use.
MAX_JOBS: Final = 2000
# Computations from whose result no job goes on.
ENDS: Final = frozenset(
    {
        "gradient", "hessian_product", "inverse_hessian", "mixed_gradient", "state", "step",
        "store_fit", "store_query", "store_rows",
    }
)  # fmt: skip


class Needed:
    """Reads the spec of a job once, while it is among those asked for last: a spec never changes.

    Any thread may call it.
    """

    def __init__(self, records: Records, runs: Runs) -> None:
        self._records, self._runs = records, runs
        self._lock = threading.Lock()
        self._of_job: dict[str, frozenset[str]] = {}
        self._num_names = 0

    def names(self) -> frozenset[str]:
        """Return the digests of blobs and the ids of jobs whose results are needed now."""
        jobs = self._records.active_ids(), self._runs.jobs_of_kept()  # in this order, as they end
        return frozenset().union(*self.by_job(chain(*jobs)).values())

    def records(self) -> frozenset[str]:
        """Return the ids of jobs whose records are needed now, and of those in `names`."""
        return self.names() | {*self._runs.jobs_of_kept(), *self._runs.jobs_of_saves()}

    def by_job(self, job_ids: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Return what each job reads; nothing for one that failed or was cancelled."""
        with self._lock:
            return {job_id: self._of(job_id) for job_id in job_ids}

    def _of(self, job_id: str) -> frozenset[str]:
        names = self._of_job.pop(job_id, None)
        if names is None:
            try:
                spec = self._records.spec(job_id)
            except GradboxError:  # the job will fail for it
                spec = None
            names = frozenset() if spec is None else frozenset(names_in(spec))
            self._num_names += 1 + len(names)
        self._of_job[job_id] = names
        while self._num_names > REMEMBERED and len(self._of_job) > 1:
            self._num_names -= 1 + len(self._of_job.pop(next(iter(self._of_job))))
        return names


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
