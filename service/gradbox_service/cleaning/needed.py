"""What the jobs that have not ended still read: their blobs, and results they continue."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from gradbox.errors import GradboxError
from gradbox.protocol import CotangentsLoss, SampleSpec, ShardRef, TensorRef
from gradbox_service.jobs import Records


class Needed:
    """Reads the spec of every active job once; a spec never changes."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._of_job: dict[str, frozenset[str]] = {}

    def names(self) -> frozenset[str]:
        """Return the digests of blobs and the ids of jobs whose results are needed now."""
        active = self._records.active_ids()
        self._of_job = {job_id: self._of(job_id) for job_id in active}
        return frozenset().union(*self._of_job.values())

    def _of(self, job_id: str) -> frozenset[str]:
        if job_id in self._of_job:
            return self._of_job[job_id]
        try:
            spec = self._records.spec(job_id)
        except GradboxError:  # the job will fail for it
            spec = None
        return frozenset() if spec is None else frozenset(_named_in(spec))


def _named_in(value: object) -> Iterator[str]:
    """Give every blob and job that a part of a spec names, wherever in it that is."""
    if isinstance(value, TensorRef | ShardRef):
        yield value.blob
    elif isinstance(value, CotangentsLoss):
        yield value.forward
    elif isinstance(value, SampleSpec) and value.against is not None:
        yield value.against
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _named_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _named_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named_in(item)
