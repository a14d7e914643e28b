"""What is looked up when Prometheus asks: the queue, runs, the devices, what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gradbox.protocol import OperationMode
from gradbox_service.admission.limits import why_no_room
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord
from gradbox_service.queue.dispatch import Dispatcher

# Of runs that made a step within this time, and at most of so many, the latest.
RUNS_SHOWN_S: Final = 3600.0
MAX_RUNS: Final = 100


@dataclass(frozen=True)
class BoxCollector(Collector):
    """Gives gauges of the box as it is now.

    The queue is known to the process whose dispatcher leads; others give none of its gauges, and
    none of runs.
    """

    box: Backing
    dispatcher: Dispatcher
    clock: Callable[[], float]

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing, so that to register this looks nothing up."""
        return ()

    def collect(self) -> Iterator[Metric]:
        leads = self.dispatcher.leads
        yield _gauge("gradbox_dispatcher_leads", "Whether this process feeds the workers", leads)
        if leads:
            yield from self._queue()
            yield from self._runs()
        yield from self._devices()
        yield from self._storage()

    def _queue(self) -> Iterator[GaugeMetricFamily]:
        now_s = self.clock()
        queued, running = self.dispatcher.jobs.snapshot()
        yield _gauge(
            "gradbox_dispatcher_lag_seconds",
            "Between the last change of a job and when the dispatcher read it",
            self.dispatcher.following.lag_s,
        )
        yield _by_user("gradbox_queued_jobs", "Jobs that wait", _counted(queued))
        yield _by_user("gradbox_running_jobs", "Jobs that run", _counted(running))
        oldest: dict[str, float] = {}
        for record in queued:
            oldest[record.owner] = max(oldest.get(record.owner, 0.0), now_s - record.created_s)
        yield _by_user("gradbox_oldest_wait_seconds", "Age of the oldest job that waits", oldest)
        yield _by_user(
            "gradbox_share_seconds",
            "Device seconds used, recent ones weighing more: what turns go by",
            dict(self.dispatcher.jobs.shares.used_s(now_s=now_s)),
        )

    def _runs(self) -> Iterator[Metric]:
        """Give what the runs do that made a step lately, and no more of them than `MAX_RUNS`."""
        since_s = self.clock() - RUNS_SHOWN_S
        active = [run for run in self.box.runs.all() if (run.last_step_s or 0.0) >= since_s]
        active = sorted(active, key=lambda run: run.last_step_s or 0.0)[-MAX_RUNS:]
        labels = ["run", "name", "user"]
        steps = CounterMetricFamily("gradbox_run_steps", "Steps that a run has made", labels=labels)
        loss, norm, seconds = (
            GaugeMetricFamily(f"gradbox_run_{name}", f"Of a run's last step: {what}", labels=labels)
            for name, what in (
                ("loss", "the loss"),
                ("grad_norm", "the norm of its gradient"),
                ("step_seconds", "how long its job took on the device"),
            )
        )
        for run, last in zip(active, self.box.runs.last_steps(active), strict=True):
            of_run = [run.id, run.spec.name, run.owner]
            steps.add_metric(of_run, run.num_steps)
            if run.loss is not None:
                loss.add_metric(of_run, run.loss)
            if last is not None:
                norm.add_metric(of_run, last.grad_norm)
                seconds.add_metric(of_run, last.seconds)
        yield from (steps, loss, norm, seconds)

    def _devices(self) -> Iterator[GaugeMetricFamily]:
        workers = self.box.fleet.workers()
        states = GaugeMetricFamily("gradbox_workers", "Workers", labels=["state"])
        counts = Counter(worker.state for worker in workers)
        for state in ("starting", "idle", "busy"):
            states.add_metric([state], counts[state])
        yield states
        memory = GaugeMetricFamily(
            "gradbox_device_memory_bytes",
            "Memory of a device: all, what the device process takes, what its job added",
            labels=["worker", "device", "kind"],
        )
        models = GaugeMetricFamily(
            "gradbox_device_model_bytes", "Weights on a device", labels=["worker", "model"]
        )
        for worker in workers:
            if worker.memory is None:
                continue
            kinds = {
                "total": worker.memory.total_bytes,
                "used": worker.memory.used_bytes,
                "job": worker.memory.job_bytes,
            }
            for kind, num_bytes in kinds.items():
                memory.add_metric([worker.name, worker.device, kind], num_bytes)
            for model, num_bytes in worker.memory.models.items():
                models.add_metric([worker.name, model], num_bytes)
        yield memory
        yield models

    def _storage(self) -> Iterator[GaugeMetricFamily]:
        for kind, by_owner in self.box.taken().items():
            yield _by_user(f"gradbox_stored_{kind}_bytes", f"What {kind}s take", dict(by_owner))
        memory, room = self.box.records.memory(), self.box.blobs.room
        yield _gauge("gradbox_redis_memory_bytes", "Memory that Redis takes", memory.used_bytes)
        if memory.bound_bytes is not None:
            yield _gauge(
                "gradbox_redis_memory_bound_bytes", "Memory that Redis may take", memory.bound_bytes
            )
        yield _gauge("gradbox_disk_free_bytes", "What the data's disk has free", room.free_bytes())
        yield _gauge("gradbox_disk_reserve_bytes", "What is to stay free", room.reserved_bytes())
        drains = self.box.operation.read().mode is OperationMode.DRAINING
        takes = not drains and not why_no_room(memory, room)
        yield _gauge("gradbox_takes_jobs", "Whether new jobs are taken", takes)


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help, value=value)


def _by_user(name: str, help: str, values: dict[str, float] | dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help, labels=["user"])
    for user, value in values.items():
        family.add_metric([user], value)
    return family


def _counted(records: Iterable[JobRecord]) -> dict[str, int]:
    return dict(Counter(record.owner for record in records))
