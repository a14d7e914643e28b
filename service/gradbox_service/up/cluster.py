"""`gradbox up --cluster`: the head of a cluster as a part of the box, and how workers reach it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradbox_service.up.part import Part, PartFailed, ended
from gradbox_service.up.saying import NotReady

MODULE: Final = "gradbox_worker.cluster"
NAME: Final = "cluster"
# Written by the head once jobs can run, and when devices come or go; removed when it ends.
ADDRESS_FILE: Final = "cluster.json"
LOOK_S: Final = 0.1


@dataclass(frozen=True)
class Cluster:
    """What the owner asked for.

    Attributes:
        address: "local", or that of a cluster, HOST:PORT.
        device: the devices of each of its machines, as in `--device`.
    """

    address: str
    device: str

    def part(self, *, data: Path, models_file: Path) -> Part:
        """Return the head, not started; what an earlier one wrote is removed."""
        address_file(data).unlink(missing_ok=True)
        arguments = ["--address", self.address, "--device", self.device]
        arguments += ["--models", str(models_file), "--data", str(data)]
        return Part(NAME, MODULE, arguments, log=data / "logs" / f"{NAME}.log")


def address_file(data: Path) -> Path:
    """Return where the head says how it is reached."""
    return data / ADDRESS_FILE


def devices_now(data: Path) -> int:
    """Return how many devices the cluster has, 0 while its head is not ready."""
    try:
        return int(json.loads(address_file(data).read_text())["num_devices"])
    except FileNotFoundError:
        return 0


def num_devices(head: Part, *, data: Path, stop: threading.Event) -> int:
    """Wait until the head is ready; return how many devices it has, 0 if told to stop.

    Raises:
        PartFailed: it ended before.
    """
    not_ready = NotReady()
    while not stop.wait(LOOK_S):
        code = head.exit_code()
        if code is not None:
            raise PartFailed.of(head, f"{ended(code)} before it had devices", code=code)
        if found := devices_now(data):
            return found
        last = next(reversed(head.lines()), "nothing yet")
        not_ready.because(f"the cluster waits for devices; its log ends with: {last}")
    return 0
