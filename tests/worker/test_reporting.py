"""Which of a job's steps the device process tells its worker."""

from __future__ import annotations

import torch

from gradbox_worker.device.messages import FromDevice, ProgressMade
from gradbox_worker.device.warm_device import REPORT_S, Gauge, Reporter
from gradbox_worker.models.registry import Registry


def phases_told(*steps: tuple[float, str]) -> list[str]:
    """Return the phases that are told, given when a job's steps come in seconds."""
    times = iter([at for at, _ in steps])
    told: list[FromDevice] = []
    gauge = Gauge(told.append, Registry({}, device=torch.device("cpu")))
    reporter = Reporter(
        told.append, stop_requested=lambda: False, gauge=gauge, clock=lambda: next(times)
    )
    for _, phase in steps:
        reporter.step(phase, 0, 1)
    return [message.phase for message in told if isinstance(message, ProgressMade)]


def test_a_new_phase_is_told_at_once() -> None:
    steps = (0.0, "forward"), (0.0, "cotangents"), (0.0, "cotangents"), (0.0, "replay")
    assert phases_told(*steps) == ["forward", "cotangents", "replay"]


def test_steps_of_one_phase_are_told_now_and_then() -> None:
    times = [index * REPORT_S / 4 for index in range(9)]
    assert phases_told(*((at, "forward") for at in times)) == ["forward"] * 3
