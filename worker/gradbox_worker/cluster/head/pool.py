"""The pool: an actor beside the head that leases devices to coordinators.

It is told of devices by the head, and of leases by coordinators, each of which gives its process:
when that dies, what it had leased is stopped, made empty and leased again. A device that died comes
back once Ray has started it anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gradbox_worker.cluster.exchange.shipped_models import FilesToShip
from gradbox_worker.cluster.head.coordinator_watch import CoordinatorWatch
from gradbox_worker.cluster.head.emptying import Emptying
from gradbox_worker.cluster.head.kept_messages import KeptMessages
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest, Leases
from gradbox_worker.cluster.head.reloading import REBUILDING, Reloading
from gradbox_worker.models.shipping import ShippedModels

POOL: Final = "pool"
# So long a lease of several devices, or of certain ones, waits for those that are being made empty.
IDLE_S: Final = 1.0


class Pool:
    """The devices of one box. An asynchronous actor: all its methods run in one loop."""

    def __init__(self, models_file: Path) -> None:
        """Have no device.

        Args:
            models_file: of the box, for machines that do not have it.
        """
        self._messages = KeptMessages()
        self._leases = Leases()
        self._actors: dict[str, Any] = {}
        self._writing: set[str] = set()  # devices that may write to files of the box
        self._granted: dict[str, asyncio.Future[list[LeasedDevice]]] = {}
        self._coordinators = CoordinatorWatch(self._end)
        self._files = FilesToShip(models_file)
        self._emptying = Emptying(self._actors, emptied=self._lend, died=self._forget)
        self._reloading = Reloading(
            self._actors,
            self._leases,
            self._files,
            first=self._writing,
            rebuilt=self._lend,
            died=self._forget,
        )

    async def messages(self) -> list[str]:
        """Return what was logged since the last call."""
        return self._messages.taken()

    async def models(self) -> ShippedModels:
        """Return the models, for a machine that is not the head's."""
        return await self._files.models()

    async def model_file(self, path: Path) -> list[Any]:
        """Return a reference to a file's bytes, in a list, for Ray would wait for its value.

        Raises:
            PermissionError: it is none of the models' files.
        """
        return [await self._files.reference(path)]

    async def add(self, name: str, actor: Any, described: Mapping[str, Any], here: bool) -> str:
        """Have one more device, which is ready.

        Args:
            described: see `ClusterDevice.describe`.
            here: whether it is on the head's machine.

        Returns:
            Why it is refused; "" if it is not.
        """
        self._files.forget()
        restarts = self._reloading.has_begun
        if not restarts and (problem := self._reloading.problem(name, described)):
            return problem
        self._actors[name] = actor
        if here and described["sees_files"]:
            self._writing.add(name)
        self._leases.add(name, sees_files=described["sees_files"])
        if restarts:
            self._reloading.restart(name)
        self._grant()
        return ""

    async def have_models(self, reloads: int) -> None:
        """Have devices with models as they were when so many reloads had been asked for.

        Those that began before are started anew, each after its job.
        """
        await self._reloading.reach(reloads)

    async def remove(self, name: str) -> None:
        """Forget a device whose machine is gone."""
        self._forget(name)

    async def num_devices(self) -> int:
        """Return how many devices there are, idle or not."""
        return self._leases.num_devices

    async def any_device(self) -> Any:
        """Return the actor of some device that may be leased; None if there is none."""
        others = self._leases.of(REBUILDING)
        return next((self._actors[name] for name in self._actors if name not in others), None)

    async def lease(self, request: LeaseRequest, pid: int) -> list[LeasedDevice]:
        """Wait for one device, and return it with what else is idle then.

        Args:
            pid: of the coordinator, on this machine.
        """
        self._coordinators.begin(request.lease, pid)
        granted = self._granted[request.lease] = asyncio.get_running_loop().create_future()
        try:
            if request.at_most > 1 or request.follows:
                await self._emptying.wait(IDLE_S)
            if request.lease not in self._coordinators:
                return []  # it was ended meanwhile
            self._leases.ask(request)
            self._grant()
            leased: list[LeasedDevice] = await granted
            return leased
        finally:
            self._granted.pop(request.lease, None)

    async def more(self, request: LeaseRequest) -> list[LeasedDevice]:
        """Return what a lease gets beyond what it has: idle devices, perhaps none."""
        if request.lease not in self._coordinators:
            return []  # its coordinator died
        return self._leased(self._leases.take_idle(request), request.lease)

    async def give_back(self, name: str, lease: str) -> None:
        """Take back a device that has ended its part, or has died, unless another lease has it."""
        if name in self._leases.of(lease):
            self._emptying.begin(name)

    async def end(self, lease: str, at_rest: bool = False) -> None:
        """End a lease: have its devices stopped, made empty, and leased again.

        Args:
            at_rest: there is nothing to be stopped.
        """
        self._end(lease, at_rest=at_rest)

    def _end(self, lease: str, *, at_rest: bool = False) -> None:
        self._coordinators.end(lease)
        self._leases.withdraw(lease)
        if (granted := self._granted.get(lease)) is not None and not granted.done():
            granted.set_result([])  # else its call would wait for ever, one of Ray's 1000
        for name in self._leases.of(lease):
            self._emptying.begin(name, at_rest=at_rest)

    def _forget(self, name: str) -> None:
        self._actors.pop(name, None)
        self._writing.discard(name)
        self._leases.remove(name)

    def _lend(self, name: str) -> None:
        self._leases.free(name)
        self._grant()

    def _grant(self) -> None:
        """Answer the leases that waited for what is idle now; each of them has a future."""
        for request, names in self._leases.granted():
            self._granted[request.lease].set_result(self._leased(names, request.lease))

    def _leased(self, names: Sequence[str], lease: str) -> list[LeasedDevice]:
        return [
            LeasedDevice(
                name,
                self._actors[name],
                lease,
                sees_files=self._leases.sees_files(name),
                writes_files=name in self._writing,
            )
            for name in names
        ]
