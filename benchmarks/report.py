"""A dated report in Markdown: what was measured, on what, with which versions, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
import timeit
from collections.abc import Iterable
from pathlib import Path

REPORTS = Path(__file__).parent / "reports"
VERSIONS = ("gradbox", "torch", "transformers", "sentence-transformers", "numpy")


def write_report(name: str, sections: Iterable[str], *, folder: Path = REPORTS) -> Path:
    """Write a report and return where."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = folder / f"{today}-{name}.md"
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([f"# {name}, {today}", _surroundings(), *sections])
    path.write_text(text + "\n")
    return path


def _surroundings() -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in VERSIONS)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return "\n".join(
        [
            f"- {_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}",
            f"- Python {platform.python_version()}, a loop of 10⁶ additions in {_loop_ms():.0f} ms",
            f"- {versions}",
            f"- `{shlex.join(['python', '-m', 'benchmarks', *sys.argv[1:]])}`",
        ]
    )


def _loop_ms() -> float:
    """Return what tells machines, and builds of Python, apart: reports differ by it before all."""
    return min(timeit.repeat("for i in range(10**6): total += i", "total = 0", number=1)) * 1e3


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
