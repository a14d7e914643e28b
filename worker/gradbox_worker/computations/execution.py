"""One job, from its spec to its result file: reads the inputs, calls the engine, writes the answer.

Knows torch and files; no queue, no Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch

from gradbox.errors import WorkerLost
from gradbox.protocol import (
    ForwardSpec,
    GradientSpec,
    HessianProductSpec,
    InverseHessianSpec,
    JacobianSpec,
    MixedGradientSpec,
    PerSampleGradientSpec,
    SharedSpec,
    StateSpec,
    StepSpec,
    StoreFitSpec,
    StoreQuerySpec,
    StoreRowsSpec,
)
from gradbox.tensors.blob import Blob
from gradbox_engine import CoupledShards, DeviceLost, Observer
from gradbox_service.store import SMALL_BYTES, Room
from gradbox_worker.computations import (
    curvature,
    estimate,
    forward,
    gradient,
    mixed_gradient,
    per_sample,
    state,
    step,
    stores,
)
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.identity import device_name
from gradbox_worker.computations.job import Compute, LoadedJob
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.leading import ALONE, Leading
from gradbox_worker.computations.memory import (
    PeakMemory,
    default_result_memory_bytes,
    used_bytes,
)
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.computations.phases import (
    MODEL_LOAD,
    READ_INPUTS,
    WRITE_RESULT,
    PhaseClock,
    PhaseEnded,
)
from gradbox_worker.computations.placement import memory_bytes
from gradbox_worker.computations.receipts import commit
from gradbox_worker.exceptions_to_problems import (
    Caught,
    caught,
    is_out_of_memory,
    wanted_bytes,
)
from gradbox_worker.files.blob_tensors import Blobs, BlobTensors
from gradbox_worker.files.result_in_memory import ResultInMemory, ResultPlace
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.models.registry import Models
from gradbox_worker.runs import RunStates
from gradbox_worker.work import Finished, Stopped, Work

log = logging.getLogger(__name__)

COMPUTATIONS: Final[Mapping[type[SharedSpec], Compute]] = {
    GradientSpec: gradient.compute,
    ForwardSpec: forward.compute,
    PerSampleGradientSpec: per_sample.compute_gradient,
    JacobianSpec: per_sample.compute_jacobian,
    MixedGradientSpec: mixed_gradient.compute,
    HessianProductSpec: curvature.compute,
    InverseHessianSpec: curvature.compute,
    StepSpec: step.compute,
    StateSpec: state.compute,
    StoreRowsSpec: stores.compute_rows,
    StoreQuerySpec: stores.compute_query,
    StoreFitSpec: stores.compute_fit,
}


class StopNow(BaseException):
    """Raised by an observer: the job is to stop before its next shard."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One attempt at a job, on the device of a registry.

    Attributes:
        blobs: see `BlobTensors`.
        kept: graphs of earlier jobs.
        runs: the states of runs; None where the device keeps none.
        observer: hears of the engine's steps; may raise `StopNow`.
        result_memory_bytes: what may be in memory of a result on its way into its file; None is
            `default_result_memory_bytes`.
        limit: what the job may allocate; None is no limit.
        pace: when a long job's state is written.
        phase_ended: told of every phase.
        small_results: whether those are given to who asks, and not written.
        leading: which devices run the job's ranges; this one leads the others.
    """

    work: Work
    registry: Models
    blobs: Blobs | Mapping[str, Blob]
    kept: KeptGraphs
    observer: Observer
    runs: RunStates | None = None
    result_memory_bytes: int | None = None
    limit: MemoryLimit | None = None
    pace: Pace | None = None
    phase_ended: PhaseEnded | None = None
    small_results: bool = False
    leading: Leading = ALONE

    def attempt(self) -> Finished | Stopped | Caught:
        """Run the job; whatever its model or its loss raises comes back as a problem."""
        answer: Finished | Stopped | Caught
        try:
            answer = caught(
                self.execute,
                doing=f"job {self.work.job_id}",
                let_through=StopNow,
                devices=self.registry.devices,
            )
        except StopNow:
            answer = Stopped()
        if isinstance(answer, Caught) and answer.spoilt:
            return answer  # with all that is on the device, see `Caught`
        if not isinstance(answer, Finished):
            self.kept.drop()
        self.kept.rest()
        return answer

    def execute(self) -> Finished:
        """Run the job and write its result file.

        A job that runs out of memory is begun again without the graphs of other jobs and the states
        of other runs, and then without models that it does not need, the least recently used first:
        as many as hold what it could not allocate. It fails once there are none that could make
        room for it. And one whose shards turn out not to be independent is begun again on this
        device alone, where the job leaves the number of devices to the box.

        Raises:
            GradboxError: the job's parts do not fit the model or each other.
            gradbox_engine.EngineError: the computation cannot be done.
            WorkerLost: a range ended one device after the other.
            StopNow: the observer said so; nothing is left behind and the models stay loaded.
        """
        work, leading, registry, kept = self.work, self.leading, self.registry, self.kept
        kept.begin(work, loaded=registry.holds(work.model))
        run = state.run_of(work.spec)
        crowded = kept.num_bytes > 0
        while True:
            try:
                with PhaseClock(self.observer, self.phase_ended) as phases:
                    return self._run(work, leading, phases)
            except CoupledShards as error:
                if leading is ALONE or work.spec.devices != "auto":
                    raise
                log.info("job %s runs on one device: %s", work.job_id, error)
                work, leading = replace(work, not_split=str(error)), leading.alone()
                continue
            except DeviceLost as error:
                raise WorkerLost(str(error)) from error
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                wanted = wanted_bytes(error)
                crowded = crowded or (self.runs is not None and self.runs.free(but=run))
                if not (crowded or self._models_are_in_the_way(wanted)):
                    if not work.spec.estimate or work.ran_out_bytes is not None:
                        raise
                    needed = used_bytes(*registry.devices) + wanted
                    work = replace(work, ran_out_bytes=needed)
                    continue
            # Outside the handler, for its traceback holds on to the failed run's tensors.
            if crowded:
                crowded, others = False, "the graphs of other jobs and the states of other runs"
                kept.drop()
                if self.runs is not None:
                    self.runs.free(but=run)
                if registry.device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                dropped = registry.drop_idle(but=work.model, wanted_bytes=wanted)
                others = f"models that it does not need: dropped {', '.join(dropped)}"
            log.info("job %s is begun again: it ran out of memory beside %s", work.job_id, others)

    def _models_are_in_the_way(self, wanted: int) -> bool:
        """Return whether a job that ran out of memory may fit once other models are dropped."""
        registry = self.registry
        if not registry.idle_bytes(but=self.work.model) or wanted > memory_bytes(registry.device):
            return False
        return self.limit is None or self.limit.leaves_room_of_models()

    def _run(self, work: Work, leading: Leading, phases: PhaseClock) -> Finished:
        device = self.registry.device
        began = time.perf_counter()
        phases.enter(MODEL_LOAD)
        result_bytes = self.result_memory_bytes or default_result_memory_bytes(device)
        with self._place() as result_file:
            rows = leading.begin(result_file)
            loaded = self.registry.get(work.model, work.model_version)
            phases.enter(READ_INPUTS)
            most_bytes = self._most_bytes(work) if work.spec.estimate else 0
            held = nullcontext() if self.limit is None else self.limit.held()
            with held, BlobTensors(self.blobs, device=device) as tensors:
                peak = PeakMemory(*loaded.devices)
                job = LoadedJob.of(
                    work,
                    loaded,
                    tensors,
                    device=device,
                    observer=leading.watched(phases),
                    rows=rows,
                    result_memory_bytes=result_bytes,
                    kept=self.kept,
                    pace=self.pace,
                    leading=leading,
                )
                job = state.on_run(job, self.runs)
                load_s = time.perf_counter() - began
                with self._state_settled(job):
                    compute = COMPUTATIONS[type(work.spec)]
                    if work.spec.estimate:
                        computed = estimate.measured(
                            job, compute, most_bytes=most_bytes, place=self._place
                        )
                    else:
                        computed = compute(job, work.spec)
                    phases.enter(WRITE_RESULT)
                    facts = {"estimate": work.estimate, **computed.facts, **state.state_facts(job)}
                    written = commit(
                        result_file,
                        replace(computed, facts=facts),
                        work,
                        rounding=job.rounding,
                        weights_widened=job.weights_widened,
                        model=loaded.name,
                        model_version=loaded.version,
                        device=device_name(*loaded.devices),
                        peak=peak,
                        load_s=load_s,
                        resumed=job.checkpoints.resumed,
                        led=leading.facts(computed.runs),
                    )
        return Finished(
            written.view,
            written.content,
            step=step.made(computed),
            saved_bytes=computed.saved_bytes,
            tensors=written.tensors,
            stored=computed.stored,
            estimate=computed.facts.get("estimate"),
        )

    def _most_bytes(self, work: Work) -> int:
        """Return what may be in memory while a job runs, if it may drop other models."""
        limit = self.limit or MemoryLimit(*self.registry.devices)
        return limit.most_bytes() + self.registry.idle_bytes(but=work.model)

    def _place(self) -> ResultPlace:
        """Return where the result goes."""
        if self.work.in_memory:
            return ResultInMemory()
        path = self.work.result_path
        room = Room(path.parent, self.work.disk_reserve_bytes)
        is_kept = isinstance(self.work.spec, StoreRowsSpec | StoreFitSpec)  # a file of the store
        small_bytes = SMALL_BYTES if self.small_results and not is_kept else 0
        return ResultOnDisk(path, room=room, small_bytes=small_bytes)

    @contextmanager
    def _state_settled(self, job: LoadedJob) -> Iterator[None]:
        """Note, once a step's result is there, that its run's state is the one it made.

        If anything fails in here after the update has begun, the state is forgotten.
        """
        try:
            yield
            if job.run is not None and job.run.resident.doubtful:
                job.run.resident.job, job.run.resident.doubtful = self.work.job_id, False
        finally:
            if self.runs is not None and job.run is not None and job.run.resident.doubtful:
                self.runs.forget(job.run.run.id)
