"""Run the plan: `python -m proofs.cuda`, with the torch that is installed.

    python -m proofs.cuda --wheels build/wheels     installs what is lacking from there, no network
    python -m proofs.cuda --minutes 9 --go-on       ends in time; a later call does what is left
    python -m proofs.cuda --device cpu --dry        the same on the CPU, at small sizes

Each step is a process with a limit of its own, ended with all that it started; one whose limit does
not fit into what is left is left out. The report is rewritten after every step.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from proofs.cuda import report
from proofs.cuda.plan import DEFAULT_MINUTES, Step, plan
from proofs.cuda.report import Done

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = ROOT / "build" / "site"
WORK: Final = ROOT / "build" / "cuda"
TAIL_LINES: Final = 30
MOST_PROCESSES: Final = 6


def main(arguments: list[str]) -> int:
    """Run the steps in order; 0 if all of them passed."""
    told = _parser().parse_args(arguments)
    deadline = time.monotonic() + 60 * told.minutes
    env = _environment(told.device)
    if told.wheels is not None:
        install = ["-m", "proofs.cuda.wheels", "install", str(told.wheels), str(SITE)]
        subprocess.run([sys.executable, *install], check=True, env=env, cwd=ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    state = WORK / "steps.json"
    done = report.load(state) if told.go_on else {}
    steps = [s for s in plan(_processes()) if told.steps is None or s.name in told.steps]
    about = report.surroundings()
    path = told.out / f"{datetime.date.today()}-{told.report}.md"
    for step in steps:
        if step.name in done or time.monotonic() + step.limit_s > deadline:
            continue
        print(f"{step.name} …", flush=True)
        done[step.name] = _run(step, env, limit_s=step.limit_s, dry=told.dry)
        print(f"{step.name}: {done[step.name].outcome}", flush=True)
        report.save(state, done)
        report.write(path, about, steps, done, WORK)
    report.write(path, about, steps, done, WORK)
    print(path.read_text())
    print(f"written to {path}")
    return int(any(step.name not in done or done[step.name].outcome != "passed" for step in steps))


def _run(step: Step, env: dict[str, str], *, limit_s: float, dry: bool) -> Done:
    """Run one step, and end its whole process group where it takes too long."""
    junit, section = WORK / f"{step.name}.xml", WORK / f"{step.name}.md"
    junit.unlink(missing_ok=True)
    section.unlink(missing_ok=True)
    command = [part.format(junit=junit, section=section) for part in step.command]
    if step.command[0] == "benchmarks":
        command += ["--device", env["GRADBOX_TEST_DEVICE"], *(["--dry"] if dry else [])]
    log = WORK / f"{step.name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    done = report.read_junit(junit) or Done("", "passed" if code == 0 else "failed")
    done.name, done.seconds = step.name, time.monotonic() - began
    if code is None:
        done.outcome = "cut off"
    elif code != 0:
        done.outcome = "failed"
    if done.outcome != "passed":
        done.tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return done


def _environment(device: str) -> dict[str, str]:
    """Return the environment of the steps: this checkout before what is installed."""
    paths = [ROOT, *(ROOT / part for part in ("client", "service", "worker")), SITE]
    own = {
        "GRADBOX_TEST_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | own


def _processes() -> int:
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proofs.cuda", description=__doc__)
    parser.add_argument("--wheels", type=Path, help="folder to install from what is lacking")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="in all [25]")
    parser.add_argument("--go-on", action="store_true", help="leave out what is done already")
    parser.add_argument("--steps", type=lambda text: text.split(","), help="only these [all]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dry", action="store_true", help="benchmarks at small sizes")
    parser.add_argument("--report", default="cuda", help="the end of the report's name [cuda]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "reports", help="folder")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
