"""`gradbox jobs list | show | watch | cancel`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gradbox.protocol import JobState, JobView


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("jobs", help="your jobs on the box")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    listing = _verb(verbs, "list", list_jobs, "your jobs, newest first")
    listing.add_argument("--state", choices=[state.value for state in JobState])
    listing.add_argument("--limit", type=int, help="at most so many")
    _verb(verbs, "show", show_job, "one job").add_argument("id")
    _verb(verbs, "watch", watch_job, "follow a job to its end").add_argument("id")
    _verb(verbs, "cancel", cancel_jobs, "cancel jobs").add_argument("id", nargs="+")


def _verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(func=run)
    return parser


def list_jobs(args: argparse.Namespace) -> int:
    """Print one line for each job."""
    from gradbox.client import GradClient

    with GradClient() as client:
        views = [job.view for job in client.jobs(state=args.state, limit=args.limit)]
    if args.json:
        _print_json(views)
    else:
        _print_table([_row(view) for view in views])
    return 0


def show_job(args: argparse.Namespace) -> int:
    """Print all that the box says of a job."""
    from gradbox.client import GradClient

    with GradClient() as client:
        view = client.job(args.id).view
    if args.json:
        print(view.model_dump_json())
        return 0
    for name, value in view.model_dump(mode="json", exclude_none=True).items():
        if name == "error" and view.error is not None:
            value = f"{view.error.code}: {view.error.detail}"
        print(f"{name:<17} {value}")
    return 0


def watch_job(args: argparse.Namespace) -> int:
    """Follow a job: a bar on a terminal, else a line for each state; 1 if it does not end well."""
    from gradbox.client import GradClient
    from gradbox.progress import ProgressBar

    with GradClient() as client:
        job = client.job(args.id)
        with ProgressBar(job.id[:12], shown=False if args.json else None) as bar:
            for event in job.events():
                bar.show(event)
                if args.json:
                    print(_event_json(event.kind, event.job or event.progress), flush=True)
                elif event.job is not None and not sys.stderr.isatty():
                    print(event.job.state.value, flush=True)
        view = job.view
    return say_how_it_ended(view)


def say_how_it_ended(view: JobView) -> int:
    """Say why a job did not end well, if it did not, and return the exit code for its end."""
    if view.error is not None:
        print(f"gradbox: {view.error.code}: {view.error.detail}", file=sys.stderr)
    elif view.state is JobState.CANCELLED:
        print(f"gradbox: job {view.id} was cancelled", file=sys.stderr)
    return 0 if view.state is JobState.DONE else 1


def cancel_jobs(args: argparse.Namespace) -> int:
    """Cancel each job and print what it is now."""
    from gradbox.client import GradClient

    with GradClient() as client:
        views = [client.job(job_id).cancel() for job_id in args.id]
    if args.json:
        _print_json(views)
        return 0
    for view in views:
        stops = view.cancel_requested and not view.state.final
        print(f"{view.id} {view.state.value}{', stops at its next shard' if stops else ''}")
    return 0


def _event_json(kind: str, data: Any) -> str:
    return json.dumps({"event": kind, "data": data.model_dump(mode="json")})


def _print_json(views: Iterable[JobView]) -> None:
    print(json.dumps([view.model_dump(mode="json") for view in views], indent=2))


def _row(view: JobView) -> Sequence[str]:
    done = ""
    if view.progress is not None and view.state is JobState.RUNNING:
        done = f"{view.progress.phase} {view.progress.done}/{view.progress.total}"
    elif view.queue_position is not None:
        done = f"position {view.queue_position}"
    elif view.error is not None:
        done = view.error.code
    age = _duration(time.time() - view.created_s)
    return (view.id, view.state.value, view.model, age, done, view.name)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    table = [("ID", "STATE", "MODEL", "AGE", "PROGRESS", "NAME"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
