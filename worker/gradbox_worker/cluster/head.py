"""The devices of a cluster: one actor for each of every machine, and which of them run which job.

The head owns the actors, so that they end with it, on this machine and on others. A machine that
joins gets actors, and one that leaves takes its own along. This machine may have none, or none that
is free: then jobs run on the others. Ray starts no actor again; whatever the reason that one is to
begin anew (it died, its models may be old, it does not stop), it is `Slot.state` `starting` until
another process has its models.

Which devices a job gets is decided by the one thread that takes turns, and by nobody else: so none
of them is promised twice, and nobody waits for a device but for a moment.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gradbox.protocol import CotangentsLoss, DeviceMemory, GradientSpec, JobSpec, StepSpec
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import JobRecord
from gradbox_worker.cluster.device_actor import GROUPS, DeviceActor
from gradbox_worker.cluster.machines import ModelVersions, devices_of
from gradbox_worker.cluster.messages import Described
from gradbox_worker.cluster.shipping import FilesToShip
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.errors import DeviceNotStarted, ModelsFileError
from gradbox_worker.models.models_file import gpus_of_a_device, read_models_file
from gradbox_worker.turns.presence import Announcer

log = logging.getLogger(__name__)

# So long after the first device is ready jobs may run, without those that are not: for those of
# this machine, whose models' versions count, the ready ones of others wait so long.
LATE_S: Final = 60.0
# Before another process is started for a device whose last one ended before it was ready.
PAUSE_S: Final = 2.0
# A job that may use more devices, or certain ones, waits so long for those that end another job.
ENDING_S: Final = 1.0
# After its job a device may take so long to come to its next shard.
ABANDON_S: Final = 30.0
# So many jobs are remembered with their devices: graphs of a forward job wait for one of the next.
NUM_JOBS: Final = 64
# A query of a store may use a device for each shard, or for so many bytes of the store's rows.
ROWS_BYTES: Final = 16 * 2**20
SOME_WAIT: Final = (
    "new devices want %g %ss, of which the cluster has %g free: another box or program has the "
    "rest, and devices that find none wait for it"
)

State = Literal["starting", "idle", "busy", "ending", "refused"]


@dataclass(eq=False)
class Slot:
    """A device, whichever process it has.

    Attributes:
        name: by which receipts, and the fleet, know it.
        node: Ray's id of its machine.
        here: whether that is the head's.
        resources: what Ray reserves for it.
        ends: a reference that fails when the process ends.
        pending: what it was asked last while it starts, and which of both questions that was.
        described: what it was when it was last ready.
        models: those that it ran, the last one last.
        idle_since: by the monotonic clock.
        stale: whether it is to build its models anew once it is idle.
        memory: what was in its memory when that was last measured.
    """

    name: str
    device: str
    node: str
    here: bool
    resources: Mapping[str, float]
    announcer: Announcer
    state: State = "starting"
    actor: Any = None
    ends: Any = None
    pending: tuple[Literal["lacks", "build"], Any] | None = None
    described: Described | None = None
    models: list[str] = field(default_factory=list)
    idle_since: float = 0.0
    stale: bool = False
    start_at: float = 0.0
    memory: DeviceMemory | None = None

    @property
    def sees_files(self) -> bool:
        """Whether it sees the box's data folder."""
        return self.described is not None and self.described.sees_files

    def is_dead(self) -> bool:
        """Return whether its process has ended."""
        return bool(ray.wait([self.ends], timeout=0)[0])


class ClusterDevices:
    """The devices of the machines that are in the cluster.

    Attributes:
        changed: notified when the state of a device changes; it guards all states.
    """

    def __init__(
        self, settings: DeviceSettings, *, devices: Sequence[str], mark: Path, fleet: Fleet
    ) -> None:
        """Have none yet; Ray has been joined.

        Args:
            settings: of every device.
            devices: of every machine: ["auto"], or its CPU actors as ["cpu", "cpu"].
            mark: a file that only those read who see the data folder; it is written.
            fleet: where each device is announced.

        Raises:
            ModelsFileError: the models file cannot be read.
        """
        self.changed = threading.Condition()
        self._settings, self._devices, self._fleet = settings, devices, fleet
        self._mark = (mark, uuid.uuid4().hex)
        mark.write_text(self._mark[1])
        self._here = ray.get_runtime_context().get_node_id()
        self._slots: dict[str, Slot] = {}
        self._nodes: set[str] = set()
        self._without: dict[str, str] = {}  # by machine, why it has no device
        self._problems: list[str] = []
        self._ran: OrderedDict[str, list[str]] = OrderedDict()  # by job, its devices
        self._reloads = fleet.reloads()
        self._late_s = math.inf  # when no other device is waited for, by the monotonic clock
        self._read_models()

    def _read_models(self) -> None:
        num_gpus = gpus_of_a_device(read_models_file(self._settings.models_file))
        self._settings = replace(self._settings, num_gpus=num_gpus)
        self._files = FilesToShip(self._settings.models_file)
        self._versions = ModelVersions()

    # --- which devices there are -----------------------------------------------------------------

    def start(self, *, stopping: threading.Event) -> int:
        """Have the devices of all machines that are there, and wait until they are ready.

        Others are not waited for longer than `LATE_S` where there is one.

        Returns:
            How many there are; 0 if told to stop meanwhile.

        Raises:
            DeviceNotStarted: none can be used; the message says why.
        """
        self.look()
        while self._is_starting() and time.monotonic() < self._late_s and not stopping.wait(0.05):
            self._go_on_starting()
            self.announce(taking_turns=False)
        ready = [slot for slot in self._slots.values() if slot.state == "idle"]
        if not ready and not stopping.is_set():
            problems = [*self._without.values(), *self._problems]
            raise DeviceNotStarted("; ".join(dict.fromkeys(problems)))
        return len(ready)

    def _is_starting(self) -> bool:
        return any(slot.state == "starting" for slot in self._slots.values())

    def look(self) -> None:
        """Look which machines there are, which devices have died, and which are ready."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for slot in [slot for slot in self._slots.values() if slot.node not in alive]:
            log.warning("the machine of device %s has left", slot.name)
            with self.changed:
                self._slots.pop(slot.name)
            slot.announcer.retire()
        self._nodes &= alive.keys()
        if new := {node: facts for node, facts in alive.items() if node not in self._nodes}:
            self._join(new, with_gpus=any(f["Resources"].get("GPU") for f in alive.values()))
        for slot in list(self._slots.values()):
            if slot.state in ("idle", "starting") and slot.actor is not None and slot.is_dead():
                self.lost(slot)
        self._go_on_starting()

    def announce(self, *, taking_turns: bool = True) -> None:
        """Say of every device that it is there; what Redis refuses is said with the next call.

        Args:
            taking_turns: whether jobs are run; until then no device is ready for any.
        """
        for slot in self._slots.values():
            if slot.state != "refused":
                state: Literal["starting", "idle"] = (
                    "idle" if taking_turns and slot.state != "starting" else "starting"
                )
                slot.announcer.announce(state, memory=slot.memory)

    def retire(self) -> None:
        """Say that all devices are gone."""
        for slot in self._slots.values():
            slot.announcer.retire()

    def reload_if_asked(self) -> None:
        """Have every device build its models anew, once it is idle, if that was asked for."""
        asked = self._fleet.reloads()
        if asked == self._reloads:
            return
        self._reloads = asked
        try:
            self._read_models()
        except ModelsFileError as error:
            log.warning("the models stay as they were: %s", error)
            for slot in self._slots.values():
                slot.announcer.note_reload(asked, error=str(error))
            return
        self._late_s = math.inf
        for slot in self._slots.values():
            with self.changed:
                slot.described, slot.stale = None, slot.state in ("busy", "ending")
            if not slot.stale:
                self._end(slot)
                self._start(slot)

    def _join(self, new: Mapping[str, Mapping[str, Any]], *, with_gpus: bool) -> None:
        """Have the devices of machines that have joined."""
        free, reserved = ray.available_resources(), []
        for node, facts in new.items():
            self._nodes.add(node)
            for slot in self._slots_of(node, facts, with_gpus=with_gpus):
                with self.changed:
                    self._slots[slot.name] = slot
                reserved.append(slot.resources)
                self._start(slot)
        for argument, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            wanted, has = sum(one.get(argument, 0) for one in reserved), free.get(kind, 0)
            if wanted > has:
                log.warning(SOME_WAIT, wanted, kind, has)

    def _slots_of(self, node: str, facts: Mapping[str, Any], *, with_gpus: bool) -> list[Slot]:
        num_gpus, host = self._settings.num_gpus, facts["NodeManagerHostname"]
        found = devices_of(facts, self._devices, num_gpus=num_gpus, with_gpus=with_gpus)
        if not found:
            has = facts["Resources"]
            self._without[node] = (
                f"{host} has no device: expected {num_gpus} GPU(s) for each (gpus_per_device in "
                f"models.toml), or --device cpu and a core, got {has.get('GPU', 0):g} GPU(s) and "
                f"{has.get('CPU', 0):g} core(s)"
            )
            log.warning("%s", self._without[node])
        elif len(found) < len(self._devices):
            numbers = (host, len(self._devices), len(found))
            log.warning("%s: expected %d devices, got GPUs for %d; the rest is left out", *numbers)
        slots = []
        for index, (device, resources) in enumerate(found):
            name = f"{host}/{device.partition(':')[0]}-{index}"
            if name in self._slots:
                name = f"{name}-{node[:6]}"  # several nodes on one machine, as in tests
            announcer = Announcer(self._fleet, name=name)
            slots.append(Slot(name, device, node, node == self._here, resources, announcer))
        return slots

    # --- one device's process --------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        """Have another process for a device, which then builds its models."""
        slot.state, slot.stale = "starting", False
        actor_class = ray.remote(max_restarts=0, concurrency_groups=GROUPS)(DeviceActor)
        slot.actor = actor_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
            **slot.resources,
        ).remote()
        slot.ends = slot.actor.ends.remote()
        if slot.here:
            self._build(slot, None, {})
        else:
            slot.pending = ("lacks", slot.actor.lacks.remote(self._files.models))

    def _settings_of(self, slot: Slot) -> DeviceSettings:
        """Return the settings of a device; those of other machines reach no Redis."""
        redis_url = self._settings.redis_url if slot.here else None
        return replace(self._settings, device=slot.device, redis_url=redis_url)

    def _build(self, slot: Slot, models: Any, files: Mapping[Path, Any]) -> None:
        """Have a process build its models, but those that the one before it has described."""
        entry = None if slot.described is None else slot.described.entry
        built = slot.actor.build.remote(
            self._settings_of(slot),
            slot.name,
            self._mark,
            shipped=models,
            files=files,
            known=None if entry is None else entry.models,
            unusable=None if entry is None else entry.unusable,
        )
        slot.pending = ("build", built)

    def _end(self, slot: Slot) -> None:
        if slot.actor is not None:
            ray.kill(slot.actor)
        slot.actor = None

    def lost(self, slot: Slot) -> None:
        """Have another process for a device whose own has ended, or is to end; after a pause."""
        with self.changed:
            if slot.name not in self._slots:
                return
            was_ready = slot.state != "starting"
            self._end(slot)
            slot.state, slot.pending = "starting", None
            slot.start_at = 0.0 if was_ready else time.monotonic() + PAUSE_S
            if slot.stale:
                slot.described = None
            self.changed.notify_all()
        log.warning("the process of device %s has ended: another one starts", slot.name)

    def _go_on_starting(self) -> None:
        """Do the next step for every device that starts, and offer those that are ready."""
        for slot in [slot for slot in self._slots.values() if slot.state == "starting"]:
            if slot.actor is None and time.monotonic() >= slot.start_at:
                self._start(slot)
            if slot.pending is None or not ray.wait([slot.pending[1]], timeout=0)[0]:
                continue
            kind, reference = slot.pending
            try:
                answer = ray.get(reference)
            except RayActorError:
                self.lost(slot)
                continue
            except RayError as error:
                self._refuse(slot, f"device {slot.name} did not start: {_first_lines(error)}")
                continue
            if kind == "lacks":
                self._build(slot, self._files.models, self._files.references(answer))
                continue
            self._late_s = min(self._late_s, time.monotonic() + LATE_S)
            if slot.here or not self._first_is_awaited_here():
                self._offer(slot, answer)

    def _first_is_awaited_here(self) -> bool:
        """Return whether to wait for a device of this machine, whose models' versions count."""
        if time.monotonic() >= self._late_s:
            return False
        slots = self._slots.values()
        if any(slot.described is not None and slot.state != "starting" for slot in slots):
            return False
        return any(slot.here and slot.state == "starting" for slot in slots)

    def _offer(self, slot: Slot, described: Described) -> None:
        """Have jobs run on a device that is ready, unless its models are others."""
        entry = described.entry
        problem = self._versions.problem(
            slot.name, entry.models, unusable=entry.unusable, software=described.software
        )
        if problem:
            self._refuse(slot, problem)
            return
        self._fleet.describe([view for view in described.views if view.usable])
        slot.announcer.offer(entry)
        slot.announcer.note_reload(self._reloads)
        slot.actor.compute.remote("import_for_jobs")  # while there is none
        log.info(
            "device %s is ready (%s) in process %d", slot.name, entry.hardware, described.process
        )
        with self.changed:
            slot.described, slot.pending = described, None
            slot.memory = entry.memory
            slot.state, slot.idle_since = "idle", time.monotonic()
            self.changed.notify_all()

    def _refuse(self, slot: Slot, problem: str) -> None:
        """Use a device no more, until the models are read again."""
        log.warning("%s", problem)
        self._problems.append(problem)
        self._end(slot)
        slot.state, slot.pending, slot.described = "refused", None, None
        slot.announcer.retire()

    # --- which devices run a job -----------------------------------------------------------------

    def idle(self) -> int:
        """Return how many devices have no job."""
        return sum(slot.state == "idle" for slot in self._slots.values())

    def name(
        self, record: JobRecord, spec: JobSpec | None, *, after: str = "", rows_bytes: int = 0
    ) -> list[Slot]:
        """Give a job its devices, of which one at least is idle; the first one leads the others.

        It gets what is idle now, up to what it asks for, and waits for no more; but for a moment
        for those that are just ending another job. First come a device of the box's machine, or
        that sees its files; then those that ran the job that this one goes on from, for graphs may
        wait there; then those that have run its model; then those that were idle longest.

        A job on a run's state gets one device of the box's machine, where that has any: that of
        the run's last step, if it is idle.

        Args:
            after: the job that made that step.
            rows_bytes: of the store that it queries.

        Returns:
            None of them, after a moment, if only others are idle.
        """
        on_run = spec is not None and is_on_run(spec)
        most = num_shards = 1
        if spec is not None and not on_run:
            num_shards = _num_shards(spec)
            most = min(max(num_shards, rows_bytes // ROWS_BYTES), _asked(spec))
        follows = self._ran.get(after or _forward_job(spec) or "", [])
        if len(follows) > most:
            follows = []
        elif follows and most > 1:
            most = len(follows)  # a job on one device stays on one
        with self.changed:
            if most > self.idle() or not self._are_idle(follows):
                deadline = time.monotonic() + ENDING_S
                while self._some_end() and time.monotonic() < deadline:
                    self.changed.wait(0.05)
            idle = [slot for slot in self._slots.values() if slot.state == "idle"]
            if on_run and any(s.here and s.state != "refused" for s in self._slots.values()):
                idle = [slot for slot in idle if slot.here]
                if not idle:
                    self.changed.wait(ENDING_S)
            idle.sort(
                key=lambda slot: (
                    follows.index(slot.name) if slot.name in follows else len(follows),
                    not slot.here,
                    not slot.sees_files,
                    record.model not in slot.models,
                    slot.idle_since,
                )
            )
            # Beyond one for each shard, those that see the files of the store.
            chosen = [s for n, s in enumerate(idle[:most]) if n < num_shards or s.sees_files]
            for slot in chosen:
                slot.state = "busy"
                slot.models = [m for m in slot.models if m != record.model] + [record.model]
        self._ran[record.id] = [slot.name for slot in chosen]
        while len(self._ran) > NUM_JOBS:
            self._ran.popitem(last=False)
        return chosen

    def _are_idle(self, names: Sequence[str]) -> bool:
        return all(n not in self._slots or self._slots[n].state == "idle" for n in names)

    def _some_end(self) -> bool:
        return any(slot.state == "ending" for slot in self._slots.values())

    def ending(self, slots: Sequence[Slot]) -> None:
        """Note that devices are about to be free."""
        with self.changed:
            for slot in slots:
                if slot.state == "busy":
                    slot.state = "ending"

    def free(self, slot: Slot) -> None:
        """Have a device that has ended its part run other jobs, in another process if need be."""
        with self.changed:
            if slot.state not in ("busy", "ending"):
                return
            if not slot.stale and not slot.is_dead():
                slot.state, slot.idle_since = "idle", time.monotonic()
                self.changed.notify_all()
                return
        self.lost(slot)


def is_on_run(spec: JobSpec) -> bool:
    """Return whether a job is on the state of a run."""
    return isinstance(spec, StepSpec) or spec.state is not None


def _num_shards(spec: JobSpec) -> int:
    """Return how many shards of a job different devices may run."""
    against = getattr(spec, "against_group", None)
    return sum(len(group.shards) for group in spec.inputs if group.name != against)


def _asked(spec: JobSpec) -> int:
    return 2**31 if spec.devices == "auto" else spec.devices


def _forward_job(spec: JobSpec | None) -> str | None:
    """Return the forward job that a job's cotangents belong to, if it is such a job."""
    if isinstance(spec, GradientSpec) and isinstance(spec.loss, CotangentsLoss):
        return spec.loss.forward
    return None


def _first_lines(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return str(cause).strip().splitlines()[-1][:500] if str(cause).strip() else repr(cause)
