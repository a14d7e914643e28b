"""What removes runs and saves: their owners, and time."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

from gradbox.errors import RunConflict
from gradbox_service.database.conditional_commands import Outdated
from gradbox_service.jobs import Records
from gradbox_service.runs.files import RunFiles
from gradbox_service.runs.record import RunRecord
from gradbox_service.runs.records import Runs
from gradbox_service.runs.states import is_taken
from gradbox_service.runs.steps import conflict, under_way

LATER: Final = "delete it when that has ended"


def delete_run(run: RunRecord, *, runs: Runs, records: Records, files: RunFiles) -> None:
    """Delete a run with its states and its history.

    Raises:
        RunConflict: a step is under way, or a save is left.
        Outdated: the run has changed meanwhile.
    """
    job = under_way(run, records)
    if job is not None:
        raise conflict(run, "a step is under way", records, then="cancel it, or wait for its end")
    saves = [save for save in runs.saves(run.owner) if save.run == run.id]
    left = [save.name for save in saves if is_taken(save, records)]
    if left:
        what = f"{', '.join(left)} would be lost"
        raise conflict(run, what, records, then="delete these saved states first")
    runs.forget(run)
    files.remove(run.id)


def delete_save(
    run: RunRecord,
    name: str,
    *,
    needed: Collection[str],
    runs: Runs,
    records: Records,
    files: RunFiles,
) -> None:
    """Delete a saved state of a run; nothing happens where there is none (any more).

    Args:
        needed: what jobs need that wait or run.

    Raises:
        RunConflict: a job needs it, or has yet to write it.
        Outdated: it has changed meanwhile.
    """
    save = runs.save(run.owner, name)
    if save is None or save.run != run.id:
        return
    job = records.get(save.job)
    if save.size_bytes is None and job is not None and not job.state.final:
        raise conflict(run, f"job {job.id} has yet to save {name!r}", records, then=LATER)
    if f"{run.id}/{name}" in needed:
        raise conflict(run, f"a job needs the saved state {name!r}", records, then=LATER)
    runs.unsave(save)
    files.remove_save(run.id, name)


def expire(*, before_s: float, runs: Runs, records: Records, files: RunFiles) -> None:
    """Delete the runs that were last used before a time, but those with saves."""
    for run in runs.all():
        if run.used_s < before_s:
            with suppress(RunConflict, Outdated):
                delete_run(run, runs=runs, records=records, files=files)
