"""What is said of how a device process ended, and whether that was a fault of its own."""

from __future__ import annotations

import pytest

from gradbox_worker.device.exits import Exit, died, exit_of
from gradbox_worker.device.last_step import JobStep, LastStep


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (3, "it exited with code 3"),
        (-11, "it was killed by SIGSEGV: a crash in native code"),
        (-6, "it was killed by SIGABRT: an abort in native code"),
        (-99, "it was killed by signal 99"),
    ],
)
def test_how_a_process_ended_in_words(code: int, says: str) -> None:
    assert exit_of(code).reason == says


@pytest.mark.parametrize(
    ("code", "num_oom_kills", "fault"),
    [
        (3, 0, "exit code 3"),
        (-11, 0, "SIGSEGV"),
        (-9, 0, None),
        (-9, 1, "killed by the kernel for lack of memory"),
        (-15, 0, None),
    ],
)
def test_only_what_a_process_did_itself_is_its_fault(
    code: int, num_oom_kills: int, fault: str | None
) -> None:
    assert exit_of(code, num_oom_kills=num_oom_kills).fault == fault


def test_a_fault_is_named_with_the_last_step_that_the_process_noted() -> None:
    page = LastStep()
    assert page.read() is None
    inherited = LastStep(page.fd)
    inherited.note("forward", 0, 7)
    inherited.note("replay", 3, 7)
    assert page.read() == JobStep("replay", 3, 7)
    crashed = Exit("it was killed by SIGSEGV", fault="SIGSEGV")
    assert died(crashed, page.read()).fault == "SIGSEGV in phase 'replay' after 3 of 7 steps"
    inherited.clear()
    assert died(crashed, page.read()).fault == "SIGSEGV before its first shard"
    assert died(Exit("it was killed by SIGKILL", fault=None), JobStep("replay", 3, 7)).fault is None
