"""What the shell completes by asking the box: jobs, runs, stores and models.

It waits a second at most, and where no box answers in that time it completes nothing and prints
nothing: whoever pressed Tab is writing a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from gradbox.cli.output import SHOWN_LENGTH
from gradbox.errors import GradboxError
from gradbox.printable import printable

if TYPE_CHECKING:
    from gradbox.client import GradClient

LOOKED_THROUGH: Final = 500
TIMEOUT_S: Final = 1.0

Completions = list[tuple[str, str]]


def complete_job(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the ids that begin so, each with what tells the job from others."""
    try:
        with _client() as client:
            views = [job.view for job in client.jobs(limit=LOOKED_THROUGH)]
    except GradboxError:
        return []
    length = max(SHOWN_LENGTH, len(incomplete))
    return [
        (view.id[:length], printable(f"{view.state} {view.model} {view.name}".rstrip()))
        for view in views
        if view.id.startswith(incomplete)
    ]


def complete_run(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the ids and names of runs that begin so, each with how far the run is."""
    try:
        with _client() as client:
            views = [run.view for run in client.runs(limit=LOOKED_THROUGH)]
    except GradboxError:
        return []
    length = max(SHOWN_LENGTH, len(incomplete))
    return [
        (text, printable(f"{view.model} {view.name}, step {view.num_steps}"))
        for view in views
        for text in (view.id[:length], view.name)
        if text and text.startswith(incomplete)
    ]


def complete_store(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the names of stores that begin so, each with how many rows it has."""
    try:
        with _client() as client:
            views = [store.view for store in client.stores()]
    except GradboxError:
        return []
    return [
        (text, printable(f"{view.model}, {view.num_rows} rows"))
        for view in views
        for text in (view.name, f"{view.owner}/{view.name}")
        if text.startswith(incomplete)
    ]


def complete_model(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the names of models that begin so, each with its size or why it cannot be used."""
    try:
        with _client() as client:
            views = client.models()
    except GradboxError:
        return []
    return [
        (
            view.name,
            printable(f"{view.num_parameters:,} parameters" if view.usable else view.reason),
        )
        for view in views
        if view.name.startswith(incomplete)
    ]


def _client() -> GradClient:
    # Only now: what defines the commands must import quickly, and without NumPy.
    from gradbox.client import GradClient
    from gradbox.http.connection import Retry

    return GradClient(timeout_s=TIMEOUT_S, retry=Retry(patience_s=0))
