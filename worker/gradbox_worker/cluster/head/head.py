"""The head of a cluster: has one actor for every device, and the pool that lends them.

It owns the actors, so that they end with it, on this machine and on others. A machine that joins
gets actors, and one that leaves takes its own along; jobs are told of neither. This machine may
have none, or none that is free: then jobs run on the others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gradbox_worker.cluster.actor.device_actor import CONTROL, ROWS, DeviceActor
from gradbox_worker.cluster.head.address_file import ClusterAddress
from gradbox_worker.cluster.head.machine import devices_of
from gradbox_worker.cluster.head.pool import POOL, Pool
from gradbox_worker.cluster.head.ray_session import RayOnThisMachine
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.models.models_file import gpus_of_a_device, read_models_file

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
# So long after the first device is ready jobs may run, without those that are not: for those of
# this machine, whose models' versions count, the ready ones of others wait so long.
LATE_S: Final = 60.0
SOME_WAIT: Final = (
    "new devices want %g %ss, of which the cluster has %g free: another box or program has the "
    "rest, and devices that find none wait for it"
)
ENDED: Final = "Ray on this machine ended, or the pool of devices"


@dataclass(frozen=True)
class _Starting:
    """A device that has not said yet that it is ready."""

    name: str
    node: str
    actor: Any
    described: Any


class Head:
    """The devices of the machines that are in the cluster."""

    def __init__(self, settings: DeviceSettings, *, devices: Sequence[str], mark: Path) -> None:
        """Make the pool, on this machine; Ray has been joined.

        Args:
            settings: of every device.
            devices: of every machine: ["auto"], or its CPU actors as ["cpu", "cpu"].
            mark: a file that only those read who see the data folder; it is written.

        Raises:
            ModelsFileError: the models file cannot be read.
        """
        self._num_gpus = gpus_of_a_device(read_models_file(settings.models_file))
        self._settings = replace(settings, num_gpus=self._num_gpus)
        self._devices = devices
        self._mark = (mark, uuid.uuid4().hex)
        mark.write_text(self._mark[1])
        self._here = ray.get_runtime_context().get_node_id()
        self._pool: Any = (
            ray.remote(Pool)
            .options(
                name=POOL,
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._here, soft=False),
            )
            .remote(settings.models_file)
        )
        self._starting: list[_Starting] = []
        self._late_s = math.inf  # when no other device is waited for, by the monotonic clock
        self._without: dict[str, str] = {}  # by machine, why it has no device
        self._of_node: dict[str, list[str]] = {}
        self._actors: dict[str, Any] = {}  # while a handle lives, so does the actor

    def start(self, *, stopping: threading.Event) -> int:
        """Have the devices of all machines that are there, and wait until they are ready.

        Others are not waited for longer than `LATE_S` where there is one: they are leased when they
        come.

        Returns:
            How many there are; 0 if told to stop meanwhile.

        Raises:
            DeviceNotStarted: none can be used; the message says why.
        """
        self.look()
        problems: list[str] = list(self._without.values())
        while self._starting and time.monotonic() < self._late_s and not stopping.wait(0.05):
            problems += self._lend_ready_ones()
        problems += self._lend_ready_ones()
        found = self.num_devices()
        if not found and not stopping.is_set():
            raise DeviceNotStarted("; ".join(dict.fromkeys(problems)))
        return found

    def look(self) -> None:
        """Look which machines there are, and which devices are ready; log what the pool says."""
        for message in ray.get(self._pool.messages.remote()):
            log.warning("%s", message)
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node in [node for node in self._of_node if node not in alive]:
            for name in self._of_node.pop(node):
                log.warning("the machine of device %s has left", name)
                self._actors.pop(name, None)
                ray.get(self._pool.remove.remote(name))
            self._starting = [one for one in self._starting if one.node != node]
        if new := {node: facts for node, facts in alive.items() if node not in self._of_node}:
            free: Mapping[str, float] = ray.available_resources()
            with_gpus = any(facts["Resources"].get("GPU") for facts in alive.values())
            reserved = [
                one
                for node, facts in new.items()
                for one in self._start_devices(node, facts, with_gpus=with_gpus)
            ]
            for argument, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
                wanted, has = sum(one.get(argument, 0) for one in reserved), free.get(kind, 0)
                if wanted > has:
                    log.warning(SOME_WAIT, wanted, kind, has)
        self._lend_ready_ones()

    def num_devices(self) -> int:
        """Return how many devices there are.

        Raises:
            RayActorError: the pool has ended, without which no job runs.
        """
        found: int = ray.get(self._pool.num_devices.remote())
        return found

    def _start_devices(
        self, node: str, facts: Mapping[str, Any], *, with_gpus: bool
    ) -> list[dict[str, float]]:
        """Have the actors of a machine; returns what Ray is to reserve for each."""
        names = self._of_node[node] = []
        models = None if node == self._here else POOL
        found = devices_of(facts, self._devices, num_gpus=self._num_gpus, with_gpus=with_gpus)
        if not found:
            has = facts["Resources"]
            self._without[node] = (
                f"{facts['NodeManagerHostname']} has no device: expected {self._num_gpus} GPU(s) "
                f"for each (gpus_per_device in models.toml), or --device cpu and a core, got "
                f"{has.get('GPU', 0):g} GPU(s) and {has.get('CPU', 0):g} core(s)"
            )
            log.warning("%s", self._without[node])
        elif len(found) < len(self._devices):
            told = (facts["NodeManagerHostname"], len(self._devices), len(found))
            log.warning("%s: expected %d devices, got GPUs for %d; the rest is left out", *told)
        for index, (device, resources) in enumerate(found):
            name = f"{facts['NodeManagerHostname']}/{device}-{index}"
            if any(name in others for others in self._of_node.values()):
                name = f"{name}-{node[:6]}"  # several nodes on one machine, as in tests
            actor = (
                ray.remote(max_restarts=-1, concurrency_groups={CONTROL: 1, ROWS: 1})(DeviceActor)
                .options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    **resources,
                )
                .remote(replace(self._settings, device=device), self._mark, models)
            )
            names.append(name)
            self._starting.append(_Starting(name, node, actor, actor.describe.remote()))
        return [resources for _, resources in found]

    def _lend_ready_ones(self) -> list[str]:
        """Lend the devices that are ready; logs and returns why others cannot be used."""
        problems = []
        for one in list(self._starting):
            if not ray.wait([one.described], timeout=0)[0]:
                continue
            here = one.node == self._here
            try:
                described = ray.get(one.described)
            except RayError as error:
                self._starting.remove(one)
                problems.append(f"device {one.name} did not start: {_first_lines(error)}")
                continue
            self._late_s = min(self._late_s, time.monotonic() + LATE_S)
            if not here and self._first_is_awaited_here():
                continue
            self._starting.remove(one)
            refused = ray.get(self._pool.add.remote(one.name, one.actor, described, here))
            if refused:
                problems.append(refused)
                ray.kill(one.actor)
                continue
            self._actors[one.name] = one.actor
            one.actor.import_for_jobs.remote()  # while workers start
            log.info("device %s is ready (%s)", one.name, described["hardware"])
        for problem in problems:
            log.warning("%s", problem)
        return problems

    def _first_is_awaited_here(self) -> bool:
        """Return whether to wait for a device of this machine, whose models' versions count."""
        if self._actors or time.monotonic() >= self._late_s:
            return False
        return any(one.node == self._here for one in self._starting)


def run(
    settings: DeviceSettings,
    *,
    devices: Sequence[str],
    joined: RayOnThisMachine,
    namespace: str,
    token: str,
    file: Path,
    stopping: threading.Event,
) -> None:
    """Keep the devices of a cluster that was joined until told to stop.

    Args:
        file: written once jobs can run, and when devices come or go; removed at the end.

    Raises:
        DeviceNotStarted: no device can be used.
    """
    head = Head(settings, devices=devices, mark=file.with_name(f"{file.stem}.mark"))
    found = head.start(stopping=stopping)
    if stopping.is_set():
        return
    address = ClusterAddress(
        address=joined.address,
        namespace=namespace,
        token=token,
        raylet=joined.raylet,
        num_devices=found,
    )
    address.write(file)
    log.info("the cluster at %s has %d devices", joined.address, found)
    try:
        while not stopping.wait(LOOK_S):
            if not address.answers():
                raise DeviceNotStarted(ENDED)
            head.look()
            if address.num_devices != (found := head.num_devices()):
                address = address.model_copy(update={"num_devices": found})
                address.write(file)
    except RayActorError:
        raise DeviceNotStarted(ENDED) from None
    finally:
        file.unlink(missing_ok=True)


def _first_lines(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return str(cause).strip().splitlines()[-1][:500] if str(cause).strip() else repr(cause)
