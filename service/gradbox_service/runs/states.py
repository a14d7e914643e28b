"""Which state of a run is meant, and may somebody have it."""

from __future__ import annotations

from dataclasses import dataclass

from gradbox.errors import RunNotFound
from gradbox.protocol import StateRef
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.runs.record import RunRecord, SaveRecord
from gradbox_service.runs.records import Runs
from gradbox_service.runs.steps import visible


@dataclass(frozen=True)
class SettledState:
    """The state of a run after a step; `ref` names it by the run and that step, or by a save."""

    ref: StateRef
    run: RunRecord
    step: int


def settled(ref: StateRef, *, caller: TokenInfo, runs: Runs, records: Records) -> SettledState:
    """Return the state that is meant now.

    Raises:
        RunNotFound: there is none, it is somebody else's who does not share it, or steps that it
            follows from are not kept.
    """
    if ref.save is not None:
        save = _found(ref, caller=caller, runs=runs, records=records)
        run = runs.get(save.run)
        if run is None or ref.step not in (None, save.step):
            raise _no_save(ref)
        return SettledState(StateRef(run=save.run, save=save.name), run, save.step)
    run = visible(ref.run or "", caller=caller, runs=runs)
    step = run.num_steps if ref.step is None else ref.step
    if not run.kept_after <= step <= run.num_steps:
        raise RunNotFound(
            f"expected a step of run {run.id} from {run.kept_after} to {run.num_steps}, got "
            f"{step}: the box computes states again from the oldest that it keeps; save one while "
            f"it is new (run.save) to use it later"
        )
    return SettledState(StateRef(run=run.id, step=step), run, step)


def is_taken(save: SaveRecord, records: Records) -> bool:
    """Return whether a save is there, or its job may still write it."""
    if save.size_bytes is not None:
        return True
    job = records.get(save.job)
    return job is not None and not _ended_badly(job)


def _ended_badly(job: JobRecord) -> bool:
    return job.state.final and job.result is None


def _found(ref: StateRef, *, caller: TokenInfo, runs: Runs, records: Records) -> SaveRecord:
    """Return a save of one's own, else one that its owner shares, or any for the box's owner."""
    others = [owner for owner in records.owners() if owner != caller.name]
    for owner in [caller.name, *others]:
        save = runs.save(owner, ref.save or "")
        if save is None or save.size_bytes is None or ref.run not in (None, save.run):
            continue
        if owner == caller.name or save.shared or (caller.admin and ref.run is not None):
            return save
    raise _no_save(ref)


def _no_save(ref: StateRef) -> RunNotFound:
    of_run = "" if ref.run is None else f" of run {ref.run}"
    of_step = "" if ref.step is None else f" after step {ref.step}"
    return RunNotFound(
        f"expected a saved state of yours, or a shared one, got {ref.save!r}{of_run}{of_step}, "
        f"which there is none of; `gradbox runs list` shows yours"
    )
