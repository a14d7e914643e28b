"""A job on the devices that it was given: `turns.turn` has it run by them as by a single device.

The first device runs the job and leads the others. Meanwhile the thread of the turn, in the head,
does what the worker of a plain box does: it keeps the lease, publishes progress, has the job
stopped, and kills what does not stop. Before the record says that the job has ended its devices are
about to be free, so that a job that its client sends next finds them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gradbox.errors import InvalidInputs, JobFailed, StorageFull
from gradbox.protocol import Problem, names_in
from gradbox_service.jobs import Records, Turn
from gradbox_service.store import BlobStore
from gradbox_worker.cluster.head import ABANDON_S, ENDING_S, ClusterDevices, Slot, is_on_run
from gradbox_worker.cluster.messages import Helper, News
from gradbox_worker.cluster.shipping import ShippedInputs, fetch_result
from gradbox_worker.device.last_step import JobStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.turns.supervision import AttemptWatch, Patience
from gradbox_worker.work import Died, Failed, Finished, Outcome, Supervision, Work

log = logging.getLogger(__name__)

POLL_S: Final = 0.2
LOOK_S: Final = 0.5
NEWS_S: Final = 2.0
DEVICE_ENDED: Final = "the process of its device in the cluster ended"
NO_RUNS: Final = (
    "expected a device on the box's own machine for a job on a run's weights, got a cluster with "
    "devices on others alone: states of runs stay with the box; have its owner start it on a "
    "machine with a device, or send the weights (weights=)"
)


class NamedDevices:
    """The devices of one turn; implements `Device`, for this turn alone."""

    def __init__(
        self,
        slots: Sequence[Slot],
        devices: ClusterDevices,
        *,
        records: Records,
        blobs: BlobStore,
        orders: Orders,
        patience: Patience,
    ) -> None:
        """Begin nothing.

        Args:
            slots: which are busy with this turn from now on; the first one leads.
            devices: where they are free again.
            orders: what the head has asked of this turn.
        """
        self._leader, *self._others = slots
        self._helping = {slot.name: slot for slot in self._others}
        self._devices, self._records, self._blobs = devices, records, blobs
        self._orders, self._patience = orders, patience
        self._emptied: dict[str, Any] = {}

    @property
    def models(self) -> Mapping[str, str]:
        """The versions of the models that the first device offers."""
        described = self._leader.described
        return {} if described is None else described.entry.models

    def rest(self) -> float | None:
        """Do nothing: the devices are looked after by the head."""
        return None

    def first_lives(self) -> bool:
        """Return whether the first device answers: Ray may not have noticed yet that it died."""
        if _news_of(self._leader.actor) is not None:
            return True
        self._devices.lost(self._leader)
        return False

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        """Have the first device run a job, and lead the others."""
        outcome: Outcome | None = None
        try:
            outcome = self._run(work, supervision)
        finally:
            self._devices.ending([self._leader])
            self._give_back(work, stop=not isinstance(outcome, Finished))
        return outcome

    def close(self) -> None:
        """Have the devices run other jobs."""
        self._free_given_back()
        for slot in (self._leader, *self._helping.values()):  # those that have not begun, too
            self._devices.free(slot)

    def _run(self, work: Work, supervision: Supervision) -> Outcome:
        leader = self._leader
        if is_on_run(work.spec) and not leader.here:
            return Failed(Problem.of(InvalidInputs(NO_RUNS)))
        for name in names_in(work.spec):  # devices see the data folder, and not Redis
            self._blobs.on_disk(name)
        helpers = [Helper(slot.name, slot.actor, slot.sees_files) for slot in self._others]
        inputs = None
        if not all(slot.sees_files for slot in (leader, *self._others)):
            inputs = ShippedInputs.of(work, self._blobs)
        answer = leader.actor.compute.remote("run", work, helpers, inputs)
        try:
            outcome, news = self._watched(answer, work, supervision)
            if isinstance(outcome, Finished) and not leader.sees_files:
                fetch_result(leader.actor, work)
        except RayActorError:
            return Died(DEVICE_ENDED, fault=DEVICE_ENDED)
        except StorageFull as error:
            return Failed(Problem.of(error))
        except RayTaskError as error:
            return Failed(Problem.of(JobFailed(f"job {work.job_id}: {error.cause!r}")))
        except RayError as error:
            log.critical("Ray does not answer any more: %s", error)
            os._exit(1)  # the next head counts the attempt
        self._hear(news, work, supervision)
        if isinstance(outcome, Failed) and outcome.leaving:
            self._devices.lost(leader)
        return outcome

    def _watched(self, answer: Any, work: Work, supervision: Supervision) -> tuple[Outcome, News]:
        """Return what the first device answers, having watched it until then.

        Raises:
            RayActorError: its process has ended.
        """
        held = Turn(work.job_id, work.attempt)
        watch = AttemptWatch(self._records, held, patience=self._patience)
        looked_s, stopping, step = time.monotonic(), False, None
        while not ray.wait([answer], timeout=POLL_S)[0]:
            news = _news_of(self._leader.actor)
            step = (None if news is None else self._hear(news, work, supervision)) or step
            if time.monotonic() - looked_s >= LOOK_S:
                looked_s = time.monotonic()
                watch.look(step)
            self._orders.look = self._orders.look or watch.stop_reason is not None
            if supervision.stop_requested() and not stopping:
                stopping = True
                self._stop([self._leader, *self._others], work)
            if watch.is_overdue():
                log.warning("job %s does not stop: killing its device", work.job_id)
                ray.kill(self._leader.actor)
        found: tuple[Outcome, News] = ray.get(answer)
        return found

    def _hear(self, news: News, work: Work, supervision: Supervision) -> JobStep | None:
        """Hand on what the first device says, with the shards that the others have done."""
        for span in news.phases:
            supervision.phase_ended(span.phase, began_s=span.began_s, ended_s=span.ended_s)
        if news.memory is not None:
            self._leader.memory = news.memory
        if news.alone:
            self._give_back(work)
            self._free_given_back()
        if news.step is None:
            return None
        phase, done, total = news.step
        for slot in self._others:
            found = _news_of(slot.actor)
            if found is not None and found.step is not None and found.step[0] == phase:
                done += found.step[1]
        step = JobStep(phase, min(done, total), total)
        supervision.progress(*step)
        return step

    def _give_back(self, work: Work, *, stop: bool = True) -> None:
        """Have the others made empty, so that they are about to be free.

        Args:
            stop: whether they may still compute for the job.
        """
        others, self._others = self._others, []
        if not others:
            return
        self._devices.ending(others)
        if stop:  # before `empty`, which may not overtake it
            self._stop(others, work)
        emptied = {slot.name: slot.actor.compute.remote("empty") for slot in others}
        ray.wait(list(emptied.values()), num_returns=len(emptied), timeout=ENDING_S)
        self._emptied |= emptied

    def _stop(self, slots: Sequence[Slot], work: Work) -> None:
        asked = [slot.actor.control.remote("stop", work.job_id, work.attempt) for slot in slots]
        ray.wait(asked, num_returns=len(asked), timeout=ENDING_S)

    def _free_given_back(self) -> None:
        """Have the others run other jobs; those that do not become empty are killed in time."""
        for name, emptied in self._emptied.items():
            slot = self._helping.pop(name)
            if _has_ended(emptied, within_s=0.0):
                self._devices.free(slot)
            else:
                threading.Thread(target=self._abandon, args=(slot, emptied), daemon=True).start()
        self._emptied = {}

    def _abandon(self, slot: Slot, emptied: Any) -> None:
        """Wait for a device that does not come to its next shard, and kill it in the end."""
        if not _has_ended(emptied, within_s=ABANDON_S):
            log.warning("device %s cannot be made empty, so it is killed", slot.name)
            ray.kill(slot.actor)
            _has_ended(slot.ends, within_s=ABANDON_S)
        self._devices.free(slot)


def _has_ended(call: Any, *, within_s: float) -> bool:
    return bool(ray.wait([call], timeout=within_s)[0])


def _news_of(actor: Any) -> News | None:
    """Return what a device says; None from one that is dead, or frozen."""
    asked = actor.control.remote("news")
    if not _has_ended(asked, within_s=NEWS_S):
        return None
    try:
        found: News = ray.get(asked)
    except RayActorError:
        return None
    return found
