"""One run: a box, its users, faults drawn by a seed, and the judgement at the end."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from proofs.chaos import faults, invariants
from proofs.chaos.disk import small_disk
from proofs.chaos.faults import Fault, Scene, acted_out, drawn
from proofs.chaos.invariants import Findings
from proofs.chaos.ledger import Ledger
from proofs.chaos.problems import know_the_answers
from proofs.chaos.recovery import Recoveries
from proofs.chaos.sessions import RESULT_WITHIN_S, Session

NUM_SESSIONS = 5
STORM_SHARE = 0.2
GENTLE_PAUSE_S = (0.3, 1.0)
EVERY_BOX_S = 45.0
EVERY_DISK_S = 70.0
EVERY_LONG_FREEZE_S = 100.0
# Room for what a box keeps free in any case, and for what the jobs of a run leave.
DISK_BYTES = 2560 * 2**20


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        whole_box: whether the box is killed as a whole, and frozen beyond leases.
        full_disk: whether the disk is filled, where that can be tried.
    """

    minutes: float
    seed: int
    num_workers: int = 2
    whole_box: bool = True
    full_disk: bool = True
    verbose: bool = False


@dataclass
class Outcome:
    """What a run found."""

    plan: Plan
    faults: Counter[str]
    recoveries: Recoveries
    ledger: Ledger
    findings: Findings
    jobs_by_state: Counter[str]
    attempts: Counter[int]
    skipped: list[str]
    seconds: float
    load: tuple[float, float, float]
    log: list[str] = field(default_factory=list)


def run(plan: Plan) -> Outcome:
    """Run users and faults for the minutes of a plan, then judge."""
    know_the_answers()
    begin = time.monotonic()
    skipped: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradbox-chaos-")))
        full_disk = plan.full_disk and stack.enter_context(small_disk(folder / "data", DISK_BYTES))
        if plan.full_disk and not full_disk:
            skipped.append("full disk: mounting a tmpfs takes root, this user may not")
        scene = stack.enter_context(
            acted_out(
                folder,
                owners=[f"user-{index}" for index in range(NUM_SESSIONS)],
                num_workers=plan.num_workers,
                seed=plan.seed,
                verbose=plan.verbose,
            )
        )
        box, ledger, recoveries = scene.box, scene.ledger, scene.recoveries
        sessions = _sessions(scene, seed=plan.seed)
        for session in sessions:
            session.start()
        injected = _inject(scene, plan, full_disk=bool(full_disk))
        findings = Findings(never_recovered=recoveries.never)
        _finish(sessions, findings)
        jobs = invariants.states_when_settled(box, findings)
        invariants.judge_jobs(box, ledger, jobs, findings)
        invariants.judge_processes(box, findings)
        invariants.judge_files(box, jobs, findings)
        invariants.judge_keys(box, jobs, findings)
        invariants.left_running(box, findings)
    return Outcome(
        plan=plan,
        faults=injected,
        recoveries=recoveries,
        ledger=ledger,
        findings=findings,
        jobs_by_state=Counter(job["state"] for job in jobs.values()),
        attempts=Counter(job["attempts"] for job in jobs.values()),
        skipped=skipped,
        seconds=time.monotonic() - begin,
        load=os.getloadavg(),
        log=recoveries.log.lines,
    )


def _sessions(scene: Scene, *, seed: int) -> list[Session]:
    return [
        Session(
            f"{seed}-{index}",
            owner=owner,
            token=token,
            url=scene.proxy.url,
            seed=f"{seed}/{owner}",
            ledger=scene.ledger,
        )
        for index, (owner, token) in enumerate(scene.box.tokens.items())
    ]


def _inject(scene: Scene, plan: Plan, *, full_disk: bool) -> Counter[str]:
    """Inject faults until time is over, one after another or several at once."""
    injected: Counter[str] = Counter()
    begin = time.monotonic()
    rare = _rare(scene, plan, full_disk=full_disk)

    def note(fault: Fault, hit: str | None) -> None:
        if hit is None:
            return
        injected[fault.name] += 1
        scene.recoveries.log.note(f"{fault.name}: {hit}")

    while time.monotonic() - begin < plan.minutes * 60:
        if scene.recovering:
            note(faults.CUT, faults.CUT.alone(scene))
            time.sleep(scene.rng.uniform(*GENTLE_PAUSE_S))
            continue
        fault = next(rare)
        if fault is not None:
            note(fault, fault.alone(scene))
        elif scene.rng.random() < STORM_SHARE:
            for fault, hit in _storm(scene):
                note(fault, hit)
            scene.watch_whole("all after a storm")
        else:
            fault = drawn(scene.rng, faults.FAULTS)
            note(fault, fault.alone(scene))
        time.sleep(scene.rng.uniform(0.05, 0.4))
    for watch in scene.watches:
        watch.join()
    if scene.observer.until_whole() is None:
        scene.recoveries.never.append("the box after the last fault")
    return injected


def _storm(scene: Scene) -> Iterator[tuple[Fault, str | None]]:
    """Inject several faults before the box is done with the first."""
    possible = [fault for fault in faults.FAULTS if fault.among is not None]
    for _ in range(scene.rng.randint(3, 6)):
        fault = drawn(scene.rng, possible)
        assert fault.among is not None
        yield fault, fault.among(scene)
        time.sleep(scene.rng.uniform(0.0, 0.5))


def _rare(scene: Scene, plan: Plan, *, full_disk: bool) -> Iterator[Fault | None]:
    """Give the fault whose time has come among those that take long, else None."""
    long_freezes = itertools.cycle(faults.FREEZE_LONG)
    every = {"box": EVERY_BOX_S, "freeze": EVERY_LONG_FREEZE_S, "disk": EVERY_DISK_S}
    due = {kind: time.monotonic() + seconds / 2 for kind, seconds in every.items()}
    while True:
        kind = next((kind for kind, at in due.items() if time.monotonic() >= at), None)
        if kind is not None:
            due[kind] = time.monotonic() + every[kind]
        if kind == "box" and plan.whole_box:
            yield drawn(scene.rng, faults.WHOLE_BOX)
        elif kind == "freeze" and plan.whole_box:
            yield next(long_freezes)
        elif kind == "disk" and full_disk:
            yield faults.FULL_DISK
        else:
            yield None


def _finish(sessions: list[Session], findings: Findings) -> None:
    for session in sessions:
        session.finish()
    give_up = time.monotonic() + RESULT_WITHIN_S + 30.0
    for session in sessions:
        session.join(max(0.0, give_up - time.monotonic()))
        if session.is_alive():
            findings.stuck.append(f"the user {session.name} still waits for a problem's end")
        elif not session.ended_well:
            findings.unexpected.append(f"the user {session.name} met an error of another kind")
