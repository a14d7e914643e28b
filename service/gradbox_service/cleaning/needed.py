"""What jobs read: their blobs, and results they continue."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pydantic import BaseModel

from gradbox.errors import GradboxError
from gradbox.protocol import CotangentsLoss, SampleSpec, ShardRef, TensorRef
from gradbox_service.jobs import Records

# Names that are remembered, of all jobs together: about 60 MB.
REMEMBERED: Final = 500_000


class Needed:
    """Reads the spec of a job once, while it is among those asked for last: a spec never changes.

    Any thread may call it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._of_job: dict[str, frozenset[str]] = {}
        self._num_names = 0

    def names(self) -> frozenset[str]:
        """Return the digests of blobs and the ids of jobs whose results are needed now."""
        return frozenset().union(*self.by_job(self._records.active_ids()).values())

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
            names = frozenset() if spec is None else frozenset(named_in(spec))
            self._num_names += 1 + len(names)
        self._of_job[job_id] = names
        while self._num_names > REMEMBERED and len(self._of_job) > 1:
            self._num_names -= 1 + len(self._of_job.pop(next(iter(self._of_job))))
        return names


def named_in(value: object) -> Iterator[str]:
    """Give every blob and job that a part of a spec names, wherever in it that is."""
    if isinstance(value, TensorRef | ShardRef):
        yield value.blob
    elif isinstance(value, CotangentsLoss):
        yield value.forward
    elif isinstance(value, SampleSpec) and value.against is not None:
        yield value.against
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from named_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from named_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_in(item)
