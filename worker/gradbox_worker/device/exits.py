"""How a device process ended, and whether the next one would end the same way.

Code that runs into a fault of its own (a crash in native code, an exit, memory that the kernel had
to take back) meets it again at the same shard, since a replay is exact. A SIGKILL or SIGTERM from
outside says nothing about the job.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradbox_worker.device.last_step import JobStep
from gradbox_worker.work import Died

VMSTAT: Final = Path("/proc/vmstat")
OUT_OF_MEMORY: Final = "killed by the kernel for lack of memory"

# Signals that the process's own code brings about.
OWN_FAULTS: Final = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"})
HINTS: Final = {
    "SIGKILL": ", perhaps by the kernel for lack of memory",
    "SIGSEGV": ": a crash in native code",
    "SIGABRT": ": an abort in native code",
    "SIGBUS": ": a crash in native code, or a file that shrank while it was read",
}


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        reason: a clause, "it was killed by SIGSEGV: a crash in native code".
        fault: what its own code ran into, in a word or two; None if it was ended from outside.
    """

    reason: str
    fault: str | None


def exit_of(code: int, *, num_oom_kills: int = 0) -> Exit:
    """Read an exit code.

    Args:
        code: as `subprocess` gives it: below zero, minus the signal that ended the process.
        num_oom_kills: how many processes of this machine the kernel has killed for lack of memory
            since this one started.
    """
    if code >= 0:
        return Exit(f"it exited with code {code}", fault=f"exit code {code}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL" and num_oom_kills > 0:
        return Exit(f"it was {OUT_OF_MEMORY} (SIGKILL)", fault=OUT_OF_MEMORY)
    reason = f"it was killed by {name}{HINTS.get(name, '')}"
    return Exit(reason, fault=name if name in OWN_FAULTS else None)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 without a count."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def died(ended: Exit, at: JobStep | None) -> Died:
    """Return what became of the job that a process ran when it ended.

    Args:
        at: the last step of the job.
    """
    if ended.fault is None:
        return Died(ended.reason)
    where = "before its first shard"
    if at is not None:
        where = f"in phase {at.phase!r} after {at.done} of {at.total} steps"
    out_of_memory = ended.fault == OUT_OF_MEMORY
    return Died(ended.reason, fault=f"{ended.fault} {where}", out_of_memory=out_of_memory)
