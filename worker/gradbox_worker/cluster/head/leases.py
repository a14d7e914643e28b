"""Which device runs for whom: the rules of the pool, without Ray.

A lease waits for one device and never for more: what else is idle at that moment joins it, up to
what it asked for. Waiting leases are served in the order in which they asked, which is the order in
which the dispatcher let their jobs begin, so that owners take turns here as they do there. A device
that ends its part is free at once, and goes to the lease that waits first.

Of the idle devices a lease gets one that sees the box's files, where there is one, then those that
ran the job which it follows, for graphs may wait there, then those that have its model loaded, then
those that were idle longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

# So many jobs a device is remembered by: graphs of a forward job wait for one of the next.
NUM_JOBS: Final = 64


@dataclass(frozen=True)
class LeaseRequest:
    """What a lease asks for.

    Attributes:
        lease: its id.
        model: what it will run.
        at_most: how many devices it can use.
        job: what it will be remembered by on its devices.
        follows: the `job` of an earlier lease, whose graphs wait on the devices that it had.
        with_files: whether its first device must see the box's data folder, where any does, so that
            a job runs whole; else one that does is preferred.
    """

    lease: str
    model: str
    at_most: int = 1
    with_files: bool = False
    job: str = ""
    follows: str = ""


@dataclass(frozen=True)
class LeasedDevice:
    """A device that a lease has.

    Attributes:
        sees_files: whether it sees the box's data folder, as one must that runs a whole job.
        lease: whose it is.
        writes_files: whether it may write to a file there beside the coordinator, on whose machine
            it is: over a network two machines that write to one file may undo each other's writes.
    """

    name: str
    actor: Any  # a handle of a `DeviceActor`
    lease: str
    sees_files: bool
    writes_files: bool


@dataclass
class _Device:
    sees_files: bool
    lease: str | None = None
    models: list[str] = field(default_factory=list)  # those it ran, the last one last
    jobs: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_JOBS))  # those it ran


class Leases:
    """The devices of a cluster, and who has them."""

    def __init__(self) -> None:
        """Have no device."""
        self._devices: dict[str, _Device] = {}
        self._idle: deque[str] = deque()  # the one that was idle longest first
        self._waiting: deque[LeaseRequest] = deque()

    @property
    def num_devices(self) -> int:
        """How many devices there are, idle or not."""
        return len(self._devices)

    def add(self, device: str, *, sees_files: bool = True) -> None:
        """Have one more device, which is idle."""
        self._devices[device] = _Device(sees_files)
        self._idle.append(device)

    def remove(self, device: str) -> None:
        """Forget a device, whoever has it."""
        self._devices.pop(device, None)
        if device in self._idle:
            self._idle.remove(device)

    def has(self, device: str) -> bool:
        """Return whether there is such a device."""
        return device in self._devices

    def sees_files(self, device: str) -> bool:
        """Return whether a device sees the box's data folder."""
        return self._devices[device].sees_files

    def ask(self, request: LeaseRequest) -> None:
        """Wait for a device."""
        self._waiting.append(request)

    def withdraw(self, lease: str) -> None:
        """Wait no longer."""
        self._waiting = deque(request for request in self._waiting if request.lease != lease)

    def free(self, device: str) -> None:
        """Note that a device has ended its part."""
        held = self._devices.get(device)
        if held is not None and held.lease is not None:
            held.lease = None
            self._idle.append(device)

    def of(self, lease: str) -> list[str]:
        """Return the devices that a lease has."""
        return [name for name, device in self._devices.items() if device.lease == lease]

    def take(self, device: str, lease: str) -> bool:
        """Give a lease one certain device, which it may have; False if another lease has it."""
        held = self._devices[device]
        if held.lease not in (None, lease):
            return False
        if held.lease is None:
            self._idle.remove(device)
        held.lease = lease
        held.models.clear()
        return True

    def granted(self) -> Iterator[tuple[LeaseRequest, list[str]]]:
        """Give idle devices to those that wait, and say to whom."""
        for request in list(self._waiting):
            devices = self.take_idle(request)
            if devices:
                self._waiting.remove(request)
                yield request, devices

    def take_idle(self, request: LeaseRequest) -> list[str]:
        """Give a lease what is idle now, though others may wait for it; no device if none is."""
        chosen = self._best(request)
        for name in chosen:
            device = self._devices[name]
            device.lease = request.lease
            device.jobs.append(request.job)
            device.models = [m for m in device.models if m != request.model] + [request.model]
            self._idle.remove(name)
        return chosen

    def _best(self, request: LeaseRequest) -> list[str]:
        warm_first = sorted(
            self._idle,
            key=lambda name: (
                not request.follows or request.follows not in self._devices[name].jobs,
                request.model not in self._devices[name].models,
            ),
        )
        first = next((n for n in warm_first if self._devices[n].sees_files), None)
        if first is not None:
            warm_first.remove(first)
            warm_first.insert(0, first)
        elif request.with_files and any(device.sees_files for device in self._devices.values()):
            return []
        return warm_first[: request.at_most]
