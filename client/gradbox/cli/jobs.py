"""`gradbox jobs list | show | watch | cancel | delete`, and which job an id means."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Annotated, Any, Final

import typer

from gradbox.cli.completion import LOOKED_THROUGH, complete_job
from gradbox.cli.output import (
    SHOWN_LENGTH,
    AsJson,
    Everybodys,
    Limit,
    brief,
    coloured,
    complain,
    duration,
    say,
    say_json,
    say_view,
    say_views,
)
from gradbox.client import GradClient
from gradbox.errors import InvalidRequest, JobNotFound, OwnerOnly
from gradbox.job import Job
from gradbox.progress import ProgressBar, begins_in, state_and_place
from gradbox.protocol import JobState, JobView

ID_LENGTH: Final = 32
SHOWN_MATCHES: Final = 5


def find_job(client: GradClient, text: str) -> Job:
    """Return the job of an id, or of an unambiguous beginning of one.

    The newest 500 jobs are looked through: the user's own, and then everybody's where the user is
    the box's owner.

    Raises:
        JobNotFound: there is none.
        InvalidRequest: several ids begin so.
    """
    if len(text) >= ID_LENGTH:
        return client.job(text)
    for everybodys in (False, True):
        try:
            jobs = client.jobs(limit=LOOKED_THROUGH, everybodys=everybodys)
        except OwnerOnly:
            break
        found = [job for job in jobs if job.id.startswith(text)]
        if len(found) > 1:
            raise InvalidRequest(_ambiguous(text, [job.view for job in found]))
        if found:
            return found[0]
    raise JobNotFound(
        f"expected the id of a job, or its beginning, got {text!r}: no job of yours has it; "
        f"`gradbox jobs list` shows yours"
    )


def _ambiguous(text: str, views: list[JobView]) -> str:
    listed = "\n".join(
        f"{view.id}  {view.state.value}  {view.model}  {view.name}".rstrip()
        for view in views[:SHOWN_MATCHES]
    )
    more = "\n…" if len(views) > SHOWN_MATCHES else ""
    return (
        f"expected the id of one job, got {text!r}, with which {len(views)} begin:\n{listed}{more}"
    )


_HELP: Final = "the job's id, or its beginning"
_ARGUMENT: Final[dict[str, Any]] = {"help": _HELP, "autocompletion": complete_job}
JobId = Annotated[str, typer.Argument(metavar="ID", **_ARGUMENT)]
JobIds = Annotated[list[str], typer.Argument(metavar="ID...", **_ARGUMENT)]


TITLES: Final = ("ID", "STATE", "MODEL", "AGE", "PROGRESS", "NAME")


commands: Final = typer.Typer(no_args_is_help=True)


@commands.command("list", help="your jobs, newest first")
def list_jobs(
    *,
    everybodys: Everybodys = False,
    state: Annotated[JobState | None, typer.Option(help="only these")] = None,
    limit: Limit = 100,
    json: AsJson = False,
) -> int:
    """Print one line for each job."""
    with GradClient() as client:
        jobs = client.jobs(state=state, limit=limit, everybodys=everybodys)
        views = [job.view for job in jobs]
    titles = (*TITLES[:2], "OWNER", *TITLES[2:]) if everybodys else TITLES
    row = partial(_row, owner=everybodys)
    return say_views(views, row, titles=titles, what="jobs", json=json)


@commands.command("show", help="one job")
def show_job(id: JobId, *, json: AsJson = False) -> int:
    """Print all that the box says of a job."""
    with GradClient() as client:
        return say_view(find_job(client, id).view, json=json)


@commands.command("watch", help="follow a job to its end")
def watch_job(id: JobId, *, json: AsJson = False) -> int:
    """Follow a job: a bar on a terminal, else a line for each state; 1 if it does not end well."""
    with GradClient() as client:
        return follow(find_job(client, id), json=json)


def follow(job: Job, *, json: bool = False) -> int:
    """Show a job's events until it is over, say how it ended, and return the exit code for that."""
    with ProgressBar(job.id[:SHOWN_LENGTH], shown=False if json else None) as bar:
        for event in job.events():
            bar.show(event)
            if json:
                data: Any = event.job or event.progress
                say_json({"event": event.kind, "data": data.model_dump(mode="json")})
            elif event.job is not None and not sys.stderr.isatty():
                say(_state(event.job))
    return say_how_it_ended(job.view)


def say_how_it_ended(view: JobView) -> int:
    """Say why a job did not end well, if it did not, and return the exit code for its end."""
    if view.error is not None:
        complain(f"{view.error.code}: {view.error.detail}")
    elif view.state is JobState.CANCELLED:
        complain(f"job {view.id} was cancelled")
    return 0 if view.state is JobState.DONE else 1


@commands.command("cancel", help="cancel jobs")
def cancel_jobs(ids: JobIds, *, json: AsJson = False) -> int:
    """Cancel each job and print what it is now."""
    with GradClient() as client:
        # All are found before the first is cancelled: a mistyped id cancels nothing.
        views = [job.cancel() for job in [find_job(client, id) for id in ids]]
    if json:
        say_json([view.model_dump(mode="json") for view in views], indent=2)
        return 0
    for view in views:
        stops = view.cancel_requested and not view.state.final
        say(f"{view.id} {view.state.value}{', stops at its next shard' if stops else ''}")
    return 0


@commands.command("delete", help="delete the results of jobs that are over")
def delete_jobs(ids: JobIds, *, json: AsJson = False) -> int:
    """Delete the result of each job, which must be over."""
    with GradClient() as client:
        jobs = [find_job(client, id) for id in ids]
        for job in jobs:
            job.delete()
            if not json:
                say(f"{job.id} deleted")
    if json:
        say_json({"deleted": [job.id for job in jobs]})
    return 0


def _row(view: JobView, *, owner: bool) -> tuple[str, ...]:
    shown_id = view.id[:SHOWN_LENGTH] if coloured(sys.stdout) else view.id
    owners = (view.owner,) if owner else ()
    age = duration(time.time() - view.created_s)
    return (shown_id, view.state.value, *owners, view.model, age, how_far(view), view.name)


def how_far(view: JobView) -> str:
    """Say in a few words how far a job is, how long it took, or why it failed."""
    if view.error is not None:
        return view.error.code
    if view.progress is not None and view.state is JobState.RUNNING:
        left = view.progress.seconds_left
        soon = "" if left is None else f", {duration(left)} left"
        return f"{view.progress.phase} {view.progress.done}/{view.progress.total}{soon}"
    if view.queue_position is not None:
        soon = begins_in(view) if view.hold is None else f"the box is {view.hold}"
        return f"position {view.queue_position}" + (f", {soon}" if soon else "")
    if view.state is JobState.DONE and view.started_s is not None and view.finished_s is not None:
        return f"took {brief(view.finished_s - view.started_s)}"
    return ""


def _state(view: JobView) -> str:
    """Return a job's state, and of one that waits its place."""
    return ", ".join(filter(None, (state_and_place(view), begins_in(view))))
