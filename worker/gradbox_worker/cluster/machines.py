"""The devices of a machine of the cluster, by what Ray says of it, and whether they are alike.

They are its GPUs, one device each, or as many on its CPU as the owner asks for, each with a share
of the cores. Where models.toml has a model that wants several GPUs, each device has so many. All
devices have the models and the software of the first one that can be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Ray reserves parts of a core in steps of this.
CORE_STEPS: Final = 10_000
AUTO: Final = "auto"
CPU: Final = "cpu"


def cpus_here() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_of(
    facts: Mapping[str, Any], devices: Sequence[str], *, num_gpus: int, with_gpus: bool
) -> list[tuple[str, dict[str, float]]]:
    """Return the devices of a machine, each with what Ray is to reserve for it.

    What would wait for ever is left out: for more GPUs than there are, for a core where Ray was
    told of none.

    Args:
        facts: what Ray says of the machine.
        devices: ["auto"], or one by one; which GPUs those are Ray decides.
        num_gpus: of one device.
        with_gpus: whether any machine of the cluster has GPUs, so that "auto" means these alone.
    """
    has = facts["Resources"]
    of_gpus: tuple[str, dict[str, float]] = ("cuda:0", {"num_gpus": num_gpus, "num_cpus": 0})
    on_gpus = [of_gpus] * (int(has.get("GPU", 0)) // num_gpus)
    if list(devices) == [AUTO]:
        if with_gpus:
            return on_gpus
        devices = [CPU]
    cores, gpus_left = int(has.get("CPU", 0)), iter(on_gpus)
    on_cpu = (CPU, {"num_cpus": _share(cores, len(devices))}) if cores else None
    each = [on_cpu if device == CPU else next(gpus_left, None) for device in devices]
    return [device for device in each if device is not None]


def _share(cores: int, num_devices: int) -> float:
    """Return each device's share of the cores: whole ones, or what there is of one."""
    return cores // num_devices or cores * CORE_STEPS // num_devices / CORE_STEPS


class ModelVersions:
    """The version of each model, as the first device has it that can be used; and its software."""

    def __init__(self) -> None:
        """Know of no device."""
        self._expected: dict[str, str] = {}
        self._software = ""

    def problem(
        self,
        device: str,
        models: Mapping[str, str],
        *,
        unusable: Mapping[str, str],
        software: str,
    ) -> str:
        """Say why a device may not be used, or "".

        Args:
            models: the version of each that can be used.
            unusable: why each other one cannot.
            software: what the receipt states of the first device, and must be true of all.
        """
        self._software = self._software or software
        if software != self._software:
            return (
                f"device {device} is refused: expected {self._software} as on the first device, "
                f"got {software}; install the same on all machines"
            )
        if not self._expected:
            self._expected = dict(models)
        for model, expected in self._expected.items():
            if models.get(model) != expected:
                got = models.get(model) or "none"
                got += f", for {unusable[model]}" if model in unusable else ""
                return (
                    f"device {device} is refused: expected model {model!r} at version {expected} "
                    f"as on the first device, got {got}; have the same packages on all machines, "
                    f"and what its source names"
                )
        return ""
