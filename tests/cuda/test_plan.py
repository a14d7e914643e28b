"""The plan itself, on any machine: limits, the report after a cut, what wheels are installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cuda.parts import PARTS
from benchmarks.options import CUDA_PARTS
from proofs.cuda import __main__ as run
from proofs.cuda import report
from proofs.cuda.plan import DEFAULT_MINUTES, Step, plan
from proofs.cuda.wheels import Requirement, _is_there, wanted

ENV = {"GRADBOX_TEST_DEVICE": "cpu", "PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WORK", tmp_path)


def test_every_path_and_every_part_of_the_plan_is_there() -> None:
    for step in plan(1):
        paths = [part for part in step.command if part.startswith("tests/")]
        assert all((run.ROOT / path).exists() for path in paths), step.name
    measured = {s.command[3] for s in plan(1) if s.command[0] == "benchmarks"}
    assert measured == set(CUDA_PARTS) == set(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", CUDA_PARTS)
def test_every_part_runs_on_a_cpu_at_small_sizes(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "cuda", "--device", "cpu", "--dry"]
    done = subprocess.run(
        [*command, "--parts", part, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=run.ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_step_takes_a_call_of_ten_minutes_and_the_first_ones_fit_the_default() -> None:
    steps = plan(1)
    assert all(step.limit_s <= 300 for step in steps)
    assert sum(step.limit_s for step in steps[:-2]) <= 60 * (DEFAULT_MINUTES + 5)


def test_a_step_that_takes_too_long_is_ended_and_reported(tmp_path: Path) -> None:
    step = Step("slow", "Something slow", ["timeit", "-n", "1", "import time; time.sleep(60)"], 1)
    done = {"slow": run._run(step, ENV, limit_s=1.0, dry=True)}
    assert done["slow"].outcome == "cut off"
    report.save(tmp_path / "steps.json", done)
    path = tmp_path / "out" / "report.md"
    report.write(path, ["- a machine"], [step, Step("next", "The next", [], 1)], done, tmp_path)
    assert "| Something slow | cut off | 1 |" in path.read_text()
    assert "| The next | not run |" in path.read_text()
    assert report.load(tmp_path / "steps.json")["slow"].outcome == "cut off"


def test_failures_are_read_from_what_pytest_writes(tmp_path: Path) -> None:
    junit = tmp_path / "tests.xml"
    junit.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="assert 1 == 2"/></testcase>'
        '<testcase classname="a" name="left"><skipped message="no kernel"/></testcase>'
        "</testsuite></testsuites>"
    )
    done = report.read_junit(junit)
    assert done is not None
    assert (done.outcome, done.counts["tests"]) == ("failed", 3)
    assert done.failures == ["a::bad: assert 1 == 2"]
    assert done.skips == {"no kernel": 1}
    assert json.dumps(done.counts)


def test_only_what_is_lacking_or_too_old_is_installed() -> None:
    version = importlib.metadata.version("pytest")
    assert _is_there("pytest", [Requirement(f"pytest>={version}")])
    assert not _is_there("pytest", [Requirement("pytest>=1000")])
    assert not _is_there("no-such-package", [])
    assert not {"torch", "gradbox"} & {requirement.name for requirement in wanted()}
