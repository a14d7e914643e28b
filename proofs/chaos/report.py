"""A run's verdict: a table to read, and JSON to keep."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from proofs.chaos.run import Outcome

FAULTS_PER_MINUTE = 20
SHOWN = 12


def misses(outcome: Outcome) -> list[str]:
    """Return what did not hold, a sentence each; none if the run passed."""
    found = [
        f"{name.replace('_', ' ')}: {len(sentences)}"
        for name, sentences in asdict(outcome.findings).items()
        if sentences
    ]
    wanted = int(FAULTS_PER_MINUTE * outcome.plan.minutes)
    if outcome.faults.total() < wanted:
        found.append(f"{outcome.faults.total()} faults were injected, expected {wanted} or more")
    for row in outcome.recoveries.summary():
        if row["late"]:
            found.append(f"{row['what']}: up to {row['max_s']} s, the bar is {row['bar_s']:.0f} s")
    return found


def text(outcome: Outcome) -> str:
    """Return the run as tables."""
    lines = [
        f"gradbox chaos: {outcome.plan.minutes:g} minutes, seed {outcome.plan.seed}, "
        f"{outcome.plan.num_workers} worker(s); the machine's load at the end "
        f"{outcome.load[0]:.1f}",
        *(f"skipped: {said}" for said in outcome.skipped),
        "",
        f"{'fault':36}{'times':>6}",
        *(f"{name:36}{count:6}" for name, count in sorted(outcome.faults.items())),
        f"{'all':36}{outcome.faults.total():6}",
        "",
        f"{'recovery':28}{'times':>6}{'median s':>10}{'max s':>8}{'bar s':>7}{'late':>6}",
    ]
    for row in outcome.recoveries.summary():
        bar = "" if row["bar_s"] is None else f"{row['bar_s']:.0f}"
        lines.append(
            f"{row['what']:28}{row['times']:6}{row['median_s']:10.2f}{row['max_s']:8.2f}"
            f"{bar:>7}{row['late'] if bar else '':>6}"
        )
    states = ", ".join(f"{count} {state}" for state, count in outcome.jobs_by_state.items())
    attempts = ", ".join(f"{n}: {count}" for n, count in sorted(outcome.attempts.items()))
    ledger = outcome.ledger
    lines += [
        "",
        f"jobs: {states} (by attempts: {attempts})",
        f"problems solved rightly: {ledger.num_right}; cancelled as asked: "
        f"{ledger.num_cancelled}; failed with their attempts lost: {ledger.num_attempts_lost}; "
        f"refused while the disk was full: {ledger.num_refused_for_storage}",
        f"answers of 400 and above, by status: {dict(sorted(ledger.refusals.items()))}",
        "",
    ]
    for name, sentences in asdict(outcome.findings).items():
        lines.append(f"{name.replace('_', ' '):36}{len(sentences):6}")
        lines += [f"    {sentence}" for sentence in sentences[:SHOWN]]
    missed = misses(outcome)
    return "\n".join([*lines, "", *(f"MISSED {miss}" for miss in missed), "" if missed else "PASS"])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the run as JSON."""
    return {
        "plan": asdict(outcome.plan),
        "faults": dict(outcome.faults),
        "num_faults": outcome.faults.total(),
        "recoveries": outcome.recoveries.summary(),
        "jobs": dict(outcome.jobs_by_state),
        "refusals": dict(outcome.ledger.refusals),
        "findings": asdict(outcome.findings),
        "skipped": outcome.skipped,
        "seconds": round(outcome.seconds, 1),
        "load": outcome.load,
        "log": outcome.log,
        "missed": misses(outcome),
    }
