"""One job of a client in its own process: admitted, executed, and its record ended.

It is what a service and a device do with a job between them, without what lies between those: the
checks of `gradbox_service.admission`, `computations.execution` on blobs and a result in memory, and
a `JobRecord` that nobody stores. One job runs at a time in a process, for all of them draw from its
global random generators and set its global switches.

An error of the job's own becomes its record's problem, in the words of a box, and its cause is kept
beside it. Ctrl-C goes through: the model is put back as after any error.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from gradbox.computations.computation import Posted, Submission
from gradbox.errors import InvalidJob, NeedsBox, UnusableModel
from gradbox.local import Ended
from gradbox.protocol import (
    CotangentGradientSpec,
    CotangentsLoss,
    CotangentStepSpec,
    ForwardSpec,
    GradientSpec,
    JobSpec,
    JobView,
    ModelView,
    Problem,
    ProgressView,
    SetLossSpec,
    StateSpec,
    StepSpec,
    spec_digest,
)
from gradbox.tensors.blob import Blob
from gradbox.tensors.safetensors_header import SafetensorsHeader
from gradbox_engine.requests import Phase
from gradbox_service.admission.admit import check_fit
from gradbox_service.admission.earlier_job import check_against, earlier_job
from gradbox_service.admission.estimate import may_be_estimated
from gradbox_service.admission.forward_job import KIND, WHERE, ForwardJob
from gradbox_service.jobs import JobRecord
from gradbox_worker.computations.execution import Execution, StopNow
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.local.earlier import EarlierJob, EarlierJobs
from gradbox_worker.local.models import find, local_models
from gradbox_worker.models.describe import unusable
from gradbox_worker.work import Finished, Work, out_of_time

OWNER: Final = "local"
# Between two calls that tell how far a job is; a shorter job has none.
SHOW_S: Final = 0.2

_one_job = threading.RLock()
_running: list[str] = []


@dataclass(frozen=True)
class Admitted:
    """A job that can run.

    Attributes:
        digest: of its spec.
        earlier: the job that it goes on from.
    """

    spec: JobSpec
    digest: str
    model: ModelView
    blobs: Mapping[str, Blob]
    earlier: EarlierJob | None


class LocalBox:
    """What computes the jobs of one client."""

    def __init__(self, models: Any, *, device: str = "auto") -> None:
        """Build no model yet.

        Args:
            models: modules by name, or the path of a models file.
            device: where those of a file go.

        Raises:
            InvalidJob: see `local_models`.
        """
        self._models = local_models(models, device=device)
        self._earlier = EarlierJobs()
        self._spoilt_by: list[Caught] = []  # whose tensors must not be freed, see `Caught`

    def models(self) -> list[ModelView]:
        """Describe the models, as they are now; of one that cannot be used, say why."""
        return [self._view(name) for name in self._models.names]

    def _view(self, name: str) -> ModelView:
        try:
            return self._models.view(name)
        except UnusableModel as error:
            return unusable(name, str(error))

    def model(self, name: str) -> ModelView:
        """Describe one of them.

        Raises:
            UnknownModel: there is none of that name.
        """
        return find(name, self._models)

    def run(self, submission: Submission, *, on_view: Callable[[JobView], None]) -> Ended:
        """Compute a job to its end.

        Raises:
            NeedsBox: it is one on the state of a run.
            InvalidJob: it cannot be run as it is; the subclass says why.
        """
        with _alone():
            admitted = self._admitted(submission)
            record = _begun(admitted)
            watch, causes = Watch(record, on_view), list[BaseException]()
            try:
                answer = caught(
                    lambda: self._execute(record, admitted, watch),
                    doing=f"job {record.id}",
                    let_through=(StopNow, KeyboardInterrupt),
                    explain=causes.append,
                    devices=self._models.loaded(record.model).devices,
                    log_level=logging.DEBUG,
                )
            except StopNow:
                return _failed(watch.record, Problem.of(out_of_time(record.timeout_s)))
            if isinstance(answer, Caught):
                if answer.spoilt:
                    self._spoilt_by.append(answer)
                return _failed(watch.record, answer.problem, cause=causes[0])
            done = watch.record.finish(attempt=1, result=answer.result, now_s=time.time())
            assert done is not None
            assert answer.tensors is not None
            self._earlier.keep(done, admitted.spec, admitted.blobs, answer.tensors)
            return Ended(done.view(), tensors=answer.tensors)

    def _execute(self, record: JobRecord, admitted: Admitted, watch: Watch) -> Finished:
        earlier = admitted.earlier
        work = Work(
            job_id=record.id,
            attempt=1,
            model=record.model,
            model_version=record.model_version,
            spec=admitted.spec,
            spec_digest=admitted.digest,
            result_path=Path(record.id),
            queued_s=0.0,
            earlier_result=None if earlier is None else Path(earlier.record.id),
            in_memory=True,
            earlier_tensors=None if earlier is None else earlier.result,
        )
        execution = Execution(
            work=work,
            registry=self._models.loaded(record.model),
            blobs=admitted.blobs,
            kept=KeptGraphs(),
            observer=watch,
        )
        with torch.inference_mode(False), torch.enable_grad(), _without_autocast():
            return execution.execute()

    def _admitted(self, submission: Submission) -> Admitted:
        """Check a job as a service does.

        Raises:
            NeedsBox: it is one on the state of a run.
            InvalidJob: see `may_be_estimated`, `check_fit`, `check_against` and `ForwardJob`.
        """
        blobs = {blob.digest: blob for blob in submission.blobs}
        spec, forward = self._whole(submission.spec)
        digest = spec_digest(spec)
        earlier = None if forward is None else self._earlier.job(forward.record.id)
        if earlier is not None:
            blobs = {**earlier.blobs, **blobs}
        model = find(spec.model, self._models)
        handed = HandedOver(blobs)
        may_be_estimated(spec)
        check_fit(spec, model=model, blobs=handed)
        rows = check_against(spec, model=model, owner=OWNER, records=self._earlier)
        if rows is not None:
            earlier = self._earlier.job(rows.id)
        if forward is not None:
            assert isinstance(spec, SetLossSpec)
            assert isinstance(spec.loss, CotangentsLoss)
            forward.check(spec.loss, blobs=handed)
        if isinstance(spec, ForwardSpec):
            # Its graphs would be wrong once the user has changed the module, and hold memory that
            # nobody frees.
            spec = spec.model_copy(update={"retain": 0})
        return Admitted(spec, digest, model, blobs, earlier)

    def _whole(self, posted: Posted) -> tuple[JobSpec, ForwardJob | None]:
        """Return a whole spec, and the forward job that its cotangents belong to."""
        if isinstance(posted, StepSpec | CotangentStepSpec | StateSpec) or (
            not isinstance(posted, CotangentGradientSpec) and posted.state is not None
        ):
            raise NeedsBox(
                "weights: expected tensors, or none, got a run: runs and their states are on a "
                "box; use GradClient(), or give a state dict"
            )
        if not isinstance(posted, CotangentGradientSpec):
            return posted, None
        record, spec = earlier_job(
            posted.loss.forward, where=WHERE, kind=KIND, owner=OWNER, records=self._earlier
        )
        earlier = self._earlier.job(record.id)
        forward = ForwardJob.of(record, spec, lambda: earlier.entries)
        return forward.complete(posted, GradientSpec), forward


class HandedOver:
    """The headers of blobs that a client hands over."""

    def __init__(self, blobs: Mapping[str, Blob]) -> None:
        self._blobs = blobs

    def headers(self, digests: Collection[str]) -> Mapping[str, SafetensorsHeader]:
        """Return the headers of those of these blobs that are there."""
        return {d: self._blobs[d].header for d in digests if d in self._blobs}


class Watch:
    """The engine's observer: tells how far the job is, and ends it when its time is up.

    Attributes:
        record: of the job, with its progress.
    """

    def __init__(self, record: JobRecord, on_view: Callable[[JobView], None]) -> None:
        self.record = record
        self._on_view = on_view
        now_s = time.monotonic()
        self._ends_s, self._shown_s = now_s + record.timeout_s, now_s

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a step.

        Raises:
            StopNow: the job has had its time.
        """
        now_s = time.monotonic()
        if now_s > self._ends_s:
            raise StopNow
        progress = ProgressView(phase=phase, done=done, total=total)
        self.record = replace(self.record, progress=progress)
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            self._on_view(self.record.view())


def _begun(admitted: Admitted) -> JobRecord:
    spec, model = admitted.spec, admitted.model
    now_s = time.time()
    posted = JobRecord(
        id=uuid.uuid4().hex,
        owner=OWNER,
        computation=spec.computation,
        model=model.name,
        model_version=model.version,
        spec_digest=admitted.digest,
        created_s=now_s,
        name=spec.name,
        priority=spec.priority,
        timeout_s=spec.timeout_s,
    )
    begun = posted.begin(worker=OWNER, now_s=now_s)
    assert begun is not None
    return begun


def _failed(record: JobRecord, error: Problem, *, cause: BaseException | None = None) -> Ended:
    failed = record.fail(attempt=1, error=error, now_s=time.time())
    assert failed is not None
    return Ended(failed.view(), cause=cause)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold other threads' jobs off.

    Raises:
        InvalidJob: this thread runs one already.
    """
    with _one_job:
        if _running:
            raise InvalidJob(
                "expected no job inside another one, got one that a model submits as it is called; "
                "submit it before or afterwards"
            )
        _running.append(OWNER)
        try:
            yield
        finally:
            _running.clear()


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Leave the arithmetic to the job's own `precision`."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
