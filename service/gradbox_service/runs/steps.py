"""Which job a posted step is: of each number exactly one is made.

    made                    the same content gives the job that made it; other content is refused
    the next one            nobody has posted it, or what was posted failed: a new job
                            it is under way: the same content gives that job; other is refused
    later                   refused: the run is not there yet

Content is the digest of what was posted, with all that comes from the run filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gradbox.errors import InvalidJob, RunConflict, RunNotFound
from gradbox.protocol import step_seed
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.runs.record import RunRecord
from gradbox_service.runs.records import Runs

# What a step has from its run even where all else is that of the forward job of its cotangents.
OF_THE_STEP: Final = ("run", "number")


def from_run(run: RunRecord, number: int) -> dict[str, Any]:
    """Return the fields of a step's spec that its run says."""
    spec = run.spec
    return {
        "run": run.id,
        "number": number,
        "model": run.full_model,
        "wrt": spec.wrt,
        "mode": spec.mode,
        "precision": spec.precision,
        "seed": step_seed(spec.seed, number),
    }


def completed(document: Mapping[str, Any], run: RunRecord, number: int) -> dict[str, Any]:
    """Return a posted step with what it has from its run.

    Raises:
        InvalidJob: it says something else of that itself, or has weights.
    """
    whole = dict(document)
    loss = document.get("loss")
    is_elsewhere = isinstance(loss, dict) and loss.get("kind") == "cotangents"
    for name, value in from_run(run, number).items():
        if is_elsewhere and name not in OF_THE_STEP:
            continue
        given = whole.get(name, value)
        if given != value and (name, given) != ("model", run.model):
            raise InvalidJob(
                f"{name}: expected {value!r}, which step {number} of run {run.id} has, got "
                f"{given!r:.100}; leave it out"
            )
        whole[name] = value
    for name in ("weights", "state"):
        if whole.get(name):
            raise InvalidJob(f"{name}: expected none in a step, which is made on its run's weights")
    return whole


def earlier_job(
    run: RunRecord, number: int, *, digest: str, runs: Runs, records: Records
) -> JobRecord | None:
    """Return the job that a step is already; None if it is to be a new one.

    Raises:
        RunConflict: the run is at another step, or this one has other content.
    """
    following = run.num_steps + 1
    if number > following:
        raise conflict(run, f"step {number} is not its next", records)
    if number < following:
        made = runs.step(run.id, number)
        if made is None:
            raise conflict(run, f"it began behind step {number}", records)
        view, made_digest = made
        if made_digest != digest:
            raise conflict(run, f"step {number} was made with other content", records)
        job = records.get(view.job)
        if job is None:
            raise conflict(run, f"step {number} was made and its job is forgotten", records)
        return job
    posted = records.get(run.posted_job) if run.posted_job else None
    if posted is None or (posted.state.final and not posted.result):
        return None
    if run.posted_digest != digest:
        raise conflict(run, f"step {number} is under way with other content", records)
    return posted


def under_way(run: RunRecord, records: Records) -> str | None:
    """Return the job of the run's next step, where one waits or runs."""
    posted = records.get(run.posted_job) if run.posted_job else None
    return None if posted is None or posted.state.final else posted.id


def visible(run_id: str, *, caller: TokenInfo, runs: Runs) -> RunRecord:
    """Return a run that somebody may see: one's own, or any for the box's owner.

    Raises:
        RunNotFound: there is none of this id, or it is somebody else's.
    """
    run = runs.get(run_id)
    if run is None or not (caller.admin or run.owner == caller.name):
        raise RunNotFound(
            f"expected one of your runs, got {run_id[:80]!r}; `gradbox runs list` shows them"
        )
    return run


def conflict(run: RunRecord, what: str, records: Records, *, then: str = "") -> RunConflict:
    """Return the error of what does not fit where a run is, which says that.

    Args:
        then: what to do; by default to go on with the next step.
    """
    job = under_way(run, records)
    now = f"job {job} makes step {run.num_steps + 1}" if job else "no step is under way"
    return RunConflict(
        f"{what}: run {run.id} has made {run.num_steps} steps, and {now}; "
        f"{then or f'go on with step {run.num_steps + 1}'}",
        num_steps=run.num_steps,
        under_way=job,
    )
