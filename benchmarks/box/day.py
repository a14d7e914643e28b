"""The ten-person day: does anybody wait longer than a fair share of the device would make them?

Ten people, each a thread with a client and a token of its own, send the jobs of `day_mix.csv` to
what `gradbox up` starts: one worker on one thread of the CPU. Eight hours are pressed into some
minutes, pauses and the half-life of use alike; the jobs are small in the same measure, and real.

What is compared is, for each person, the sum of all waits for a result, from submit to the end of
the job, with the sum of the fair waits; see `fair_share`. A single job may wait longer than its
fair share: a device that runs one job at a time makes the smallest job wait for the end of whatever
runs.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.box.day_jobs import Row, models_file, read_mix
from benchmarks.box.fair_share import Ran, fair_waits
from benchmarks.page import section, table, verdicts
from gradbox import GradClient
from gradbox.protocol import JobState, JobView
from gradbox_service.database.connection import connect
from gradbox_service.identity.tokens import Tokens
from gradbox_service.up.embedded_redis import url_in
from gradbox_worker.demo.box import running_box

ALLOWED: Final = 2.0
HOURS: Final = 8.0
HALF_LIFE_H: Final = 6.0


@dataclass(frozen=True)
class PersonsDay:
    """One person's jobs, device seconds, and seconds of waiting for results."""

    person: str
    num_jobs: int
    device_s: float
    waited_s: float
    fair_s: float

    @property
    def ratio(self) -> float:
        return self.waited_s / self.fair_s


@dataclass(frozen=True)
class Day:
    """A day that was run. `ratios` are those of single jobs; `load` is the machine's at the end."""

    mix: list[Row]
    people: list[PersonsDay]
    ratios: list[float]
    seconds: float
    busy_share: float
    num_failed: int
    load: float


def measure_day(*, seconds: float, seed: int = 0) -> Day:
    """Run the day, pressed into so many seconds."""
    mix = read_mix()
    os.environ["OMP_NUM_THREADS"] = "1"
    half_life_s = HALF_LIFE_H / HOURS * seconds
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as name,
        running_box(
            Path(name),
            registered=models_file(),
            arguments=["--share-half-life-s", f"{half_life_s:g}"],
        ) as (url, owners_token),
    ):
        _run_each_once(GradClient(url, owners_token), mix)
        tokens = _tokens(Path(name) / "data", [row.person for row in mix])
        began = time.time()
        with ThreadPoolExecutor(len(mix)) as pool:
            days = [
                pool.submit(_live, GradClient(url, tokens[row.person]), row, seconds, seed + number)
                for number, row in enumerate(mix)
            ]
            views = [view for day in days for view in day.result()]
        took_s = time.time() - began
    jobs = [_ran(view) for view in views if view.state is JobState.DONE]
    return Day(
        mix=mix,
        people=persons_days(jobs),
        ratios=[job.waited_s / fair for job, fair in zip(jobs, fair_waits(jobs), strict=True)],
        seconds=took_s,
        busy_share=sum(job.device_s for job in jobs) / took_s,
        num_failed=len(views) - len(jobs),
        load=os.getloadavg()[0],
    )


def persons_days(jobs: Sequence[Ran]) -> list[PersonsDay]:
    """Return what the day was for each person, in the order of their first jobs."""
    waits = fair_waits(jobs)
    found = []
    for person in dict.fromkeys(job.person for job in jobs):
        own = [(job, fair) for job, fair in zip(jobs, waits, strict=True) if job.person == person]
        found.append(
            PersonsDay(
                person,
                num_jobs=len(own),
                device_s=sum(job.device_s for job, _ in own),
                waited_s=sum(job.waited_s for job, _ in own),
                fair_s=sum(fair for _, fair in own),
            )
        )
    return found


def day_section(day: Day) -> str:
    """Describe the day."""
    recorded = {row.person: row for row in day.mix}
    rows = [
        [
            f"{p.person}: {recorded[p.person].recorded_from}",
            str(p.num_jobs),
            f"{p.device_s:.1f}",
            f"{p.waited_s / p.num_jobs:.2f}",
            f"{p.fair_s / p.num_jobs:.2f}",
            f"{p.ratio:.2f}",
        ]
        for p in day.people
    ]
    worst = max(day.people, key=lambda p: p.ratio)
    over = sum(ratio > ALLOWED for ratio in day.ratios) / len(day.ratios)
    most = f"the most is {worst.ratio:.2f}, of {worst.person}"
    bars = [
        (worst.ratio <= ALLOWED, f"nobody waits more than {ALLOWED:g} × the fair share; {most}"),
        (day.num_failed == 0, f"{day.num_failed} jobs failed"),
    ]
    return section(
        "The ten-person day",
        f"Eight hours of ten people in {day.seconds:.0f} s on one worker, {len(day.ratios)} "
        f"jobs, the device busy for {day.busy_share:.0%} of the time; load of the machine "
        f"{day.load:.1f}. Who sends what, and where that was recorded, is in "
        "benchmarks/box/day_mix.csv.",
        "The fair wait of a job is F - a: it is submitted at a, and would have ended at F if "
        "at every moment t each of the A(t) people with jobs that were submitted and not done "
        "had had 1/A(t) of the device, for the oldest of their own jobs (generalised processor "
        "sharing, from the submits and device seconds of this run). A person's figure is the "
        "sum of all waits, from submit to the job's end, over the sum of all fair waits.",
        table(
            ["", "jobs", "device s", "mean wait s", "mean fair wait s", "wait / fair wait"], rows
        ),
        f"Of single jobs {over:.0%} waited more than {ALLOWED:g} × theirs: a device that runs "
        "one job at a time makes a small job wait for the end of the one that runs.",
        verdicts(bars),
    )


def _live(client: GradClient, row: Row, seconds: float, seed: int) -> list[JobView]:
    """Send one person's jobs until the day is over; return what became of them."""
    draw = random.Random(seed)
    pause_s = row.pause_min * 60 * seconds / (HOURS * 3600)
    until = time.monotonic() + seconds
    views: list[JobView] = []
    with client:
        time.sleep(draw.uniform(0, pause_s))
        while time.monotonic() < until:
            jobs = [client.submit(row.job(draw.getrandbits(32))) for _ in range(row.at_once)]
            views += [job.wait(progress=False) for job in jobs]
            time.sleep(max(0.0, min(pause_s * draw.uniform(0.5, 1.5), until - time.monotonic())))
    return views


def _run_each_once(client: GradClient, mix: Sequence[Row]) -> None:
    """Have every kind of job done before the day: it is not the box's first."""
    with client:
        for row in mix:
            client.submit(row.job(0)).result(progress=False)


def _tokens(data: Path, people: Sequence[str]) -> Mapping[str, str]:
    connection = connect(url_in(data / "redis"))
    try:
        tokens = Tokens(connection)
        return {person: tokens.create(person) for person in people}
    finally:
        connection.close()


def _ran(view: JobView) -> Ran:
    assert view.started_s is not None  # of a job that is done
    assert view.finished_s is not None
    return Ran(view.owner, view.created_s, view.started_s, view.finished_s)
