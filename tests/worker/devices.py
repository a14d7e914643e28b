"""A device process by itself, without a worker around it."""

from __future__ import annotations

import time
from pathlib import Path

from gradbox_worker.device import DeviceProcess, DeviceSettings
from gradbox_worker.work import StopOrder, Work
from tests.valkey import empty_backing
from tests.worker.box import Box, shards_of


class Watching:
    """Supervision that lets the job run."""

    def progress(self, phase: str, done: int, total: int) -> None: ...
    def poll(self) -> StopOrder | None: ...


def box_in(folder: Path) -> Box:
    """Return what such a device reads: a models file, blobs, a folder for results."""
    return Box(folder, empty_backing(folder))


def device_of(box: Box, *, model_memory_bytes: int | None = None) -> DeviceProcess:
    """Return a device process that has not been started."""
    settings = DeviceSettings(
        models_file=box.models_file,
        data=box.folder,
        device="cpu",
        model_memory_bytes=model_memory_bytes,
    )
    return DeviceProcess(settings)


def kill(device: DeviceProcess) -> None:
    """Kill the process, and wait until that is noticed."""
    device.kill()
    while device.ready:
        time.sleep(0.01)


def work_of(box: Box, device: DeviceProcess, *, seed: int = 0) -> Work:
    """Return a job for the first of the device's models."""
    return Work(
        job_id="j",
        attempt=1,
        model=device.models[0].name,
        model_version=device.models[0].version,
        spec=box.spec(shards_of(3), seed=seed),
        spec_digest="d",
        result_path=box.folder / "results" / "j.1.safetensors",
        queued_s=0.0,
    )
