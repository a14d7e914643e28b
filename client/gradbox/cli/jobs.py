"""`gradbox jobs list | show | watch | cancel | delete`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

import typer

from gradbox.cli.output import AsJson, complain, say, say_json, say_table
from gradbox.printable import printable
from gradbox.protocol import JobState, JobView

TITLES: Final = ("ID", "STATE", "MODEL", "AGE", "PROGRESS", "NAME")

JobId = Annotated[str, typer.Argument(metavar="ID", help="the job")]
JobIds = Annotated[list[str], typer.Argument(metavar="ID...", help="the jobs")]


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    jobs = typer.Typer(help="your jobs on the box", no_args_is_help=True)
    jobs.command("list", help="your jobs, newest first")(list_jobs)
    jobs.command("show", help="one job")(show_job)
    jobs.command("watch", help="follow a job to its end")(watch_job)
    jobs.command("cancel", help="cancel jobs")(cancel_jobs)
    jobs.command("delete", help="delete the results of jobs that are over")(delete_jobs)
    app.add_typer(jobs, name="jobs")


def list_jobs(
    *,
    state: Annotated[JobState | None, typer.Option(help="only these")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="at most so many")] = None,
    json: AsJson = False,
) -> int:
    """Print one line for each job."""
    from gradbox.client import GradClient

    with GradClient() as client:
        views = [job.view for job in client.jobs(state=state, limit=limit)]
    if json:
        _say_views(views)
    else:
        say_table([TITLES, *map(_row, views)])
    return 0


def show_job(id: JobId, *, json: AsJson = False) -> int:
    """Print all that the box says of a job."""
    from gradbox.client import GradClient

    with GradClient() as client:
        view = client.job(id).view
    if json:
        say_json(view.model_dump(mode="json"))
        return 0
    for name, value in view.model_dump(mode="json", exclude_none=True).items():
        if name == "error" and view.error is not None:
            value = f"{view.error.code}: {view.error.detail}"
        say(f"{name:<17} {printable(value)}")
    return 0


def watch_job(id: JobId, *, json: AsJson = False) -> int:
    """Follow a job: a bar on a terminal, else a line for each state; 1 if it does not end well."""
    from gradbox.client import GradClient
    from gradbox.progress import ProgressBar

    with GradClient() as client:
        job = client.job(id)
        with ProgressBar(job.id[:12], shown=False if json else None) as bar:
            for event in job.events():
                bar.show(event)
                if json:
                    data: Any = event.job or event.progress
                    say_json({"event": event.kind, "data": data.model_dump(mode="json")})
                elif event.job is not None and not sys.stderr.isatty():
                    say(event.job.state.value)
        view = job.view
    return say_how_it_ended(view)


def say_how_it_ended(view: JobView) -> int:
    """Say why a job did not end well, if it did not, and return the exit code for its end."""
    if view.error is not None:
        complain(f"{view.error.code}: {view.error.detail}")
    elif view.state is JobState.CANCELLED:
        complain(f"job {view.id} was cancelled")
    return 0 if view.state is JobState.DONE else 1


def cancel_jobs(id: JobIds, *, json: AsJson = False) -> int:
    """Cancel each job and print what it is now."""
    from gradbox.client import GradClient

    with GradClient() as client:
        views = [client.job(job_id).cancel() for job_id in id]
    if json:
        _say_views(views)
        return 0
    for view in views:
        stops = view.cancel_requested and not view.state.final
        say(f"{view.id} {view.state.value}{', stops at its next shard' if stops else ''}")
    return 0


def delete_jobs(id: JobIds) -> int:
    """Delete the result of each job, which must be over."""
    from gradbox.client import GradClient

    with GradClient() as client:
        for job_id in id:
            client.job(job_id).delete()
            say(f"{job_id} deleted")
    return 0


def _say_views(views: list[JobView]) -> None:
    say_json([view.model_dump(mode="json") for view in views], indent=2)


def _row(view: JobView) -> tuple[str, ...]:
    done = ""
    if view.progress is not None and view.state is JobState.RUNNING:
        done = f"{view.progress.phase} {view.progress.done}/{view.progress.total}"
    elif view.queue_position is not None:
        done = f"position {view.queue_position}"
    elif view.error is not None:
        done = view.error.code
    age = _duration(time.time() - view.created_s)
    return (view.id, view.state.value, view.model, age, done, view.name)


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
