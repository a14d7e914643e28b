"""The report of `python -m proofs.cuda`, rewritten after every step: a cut leaves what was done."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from proofs.cuda.plan import Step

SHOWN_FAILURES: Final = 40
DRIVER: Final = "name,driver_version,memory.total,clocks.max.sm,power.limit"
ASK_TORCH: Final = """
import torch, transformers
gpu = torch.cuda.is_available()
found = torch.cuda.get_device_properties(0) if gpu else None
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
      f"{torch.backends.cudnn.version() if gpu else None}, transformers {transformers.__version__}")
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"
      if gpu else "no CUDA device")
"""


@dataclass
class Done:
    """How a step went."""

    name: str
    outcome: str  # "passed", "failed", "skipped", "cut off"
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)  # by reason
    tail: str = ""  # of its output, where it did not pass


def surroundings() -> list[str]:
    """Say on what this runs: the command, the machine, its driver, its libraries."""
    driver = _said("nvidia-smi", f"--query-gpu={DRIVER}",
                   "--format=csv,noheader")  # fmt: skip
    commit = _said("git", "rev-parse", "--short", "HEAD")
    libraries = _said(sys.executable, "-c", ASK_TORCH).splitlines()
    return [
        f"- `{shlex.join(['python', '-m', 'proofs.cuda', *sys.argv[1:]])}`, commit {commit or '?'}",
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- {platform.platform()}, Python {platform.python_version()}",
        f"- driver: {driver or 'no nvidia-smi here'}",
        *(f"- {line}" for line in libraries),
    ]


def read_junit(path: Path) -> Done | None:
    """Return what pytest wrote of its tests; None if it was ended before that."""
    if not path.exists():
        return None
    suite = next(iter(ET.parse(path).getroot().iter("testsuite")))
    counts = {kind: int(suite.get(kind, 0)) for kind in ("tests", "failures", "errors", "skipped")}
    done = Done("", "failed" if counts["failures"] + counts["errors"] else "passed", counts=counts)
    if counts["skipped"] == counts["tests"] > 0:
        done.outcome = "skipped"
    for case in suite.iter("testcase"):
        place = f"{case.get('classname')}::{case.get('name')}"
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                lines = (found.get("message") or "").splitlines() or [""]
                done.failures.append(f"{place}: {lines[0][:200]}")
        if (skipped := case.find("skipped")) is not None:
            reason = (skipped.get("message") or "").splitlines()[0][:120]
            done.skips[reason] = done.skips.get(reason, 0) + 1
    return done


def write(
    path: Path, about: Sequence[str], steps: Sequence[Step], done: dict[str, Done], folder: Path
) -> None:
    """Write the whole report."""
    lines = ["# CUDA", "", *about, "", "| step | outcome | s | tests |", "|---|---|--:|---|"]
    lines += [_row(step, done.get(step.name)) for step in steps]
    for step in steps:
        lines += _section(step, done.get(step.name), folder / f"{step.name}.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def save(path: Path, done: dict[str, Done]) -> None:
    """Keep what is done, for a later call to go on from."""
    path.write_text(json.dumps({name: asdict(one) for name, one in done.items()}, indent=1))


def load(path: Path) -> dict[str, Done]:
    """Return what an earlier call has done."""
    if not path.exists():
        return {}
    return {name: Done(**one) for name, one in json.loads(path.read_text()).items()}


def _row(step: Step, done: Done | None) -> str:
    if done is None:
        return f"| {step.title} | not run | | |"
    counts = ", ".join(f"{number} {kind}" for kind, number in done.counts.items() if number)
    return f"| {step.title} | {done.outcome} | {done.seconds:.0f} | {counts} |"


def _section(step: Step, done: Done | None, section: Path) -> Iterator[str]:
    if done is None:
        return
    if section.exists():
        yield from ("", section.read_text().strip())
    if not (done.failures or done.skips or done.tail):
        return
    yield from (
        "",
        f"## {step.title}: {done.outcome}",
        "",
        f"`python -m {shlex.join(step.command)}`",
        "",
    )
    yield from (f"- {failure}" for failure in done.failures[:SHOWN_FAILURES])
    if len(done.failures) > SHOWN_FAILURES:
        yield f"- and {len(done.failures) - SHOWN_FAILURES} more"
    yield from (f"- skipped {number}: {reason}" for reason, number in done.skips.items())
    if done.tail:
        yield from ("", "```", done.tail, "```")


def _said(*command: str) -> str:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
