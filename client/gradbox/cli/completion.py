"""What the shell completes by asking the box: jobs, runs, stores and models.

It waits a second at most, and where no box answers in that time it completes nothing and prints
nothing: whoever pressed Tab is writing a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    length = max(SHOWN_LENGTH, len(incomplete))
    return _begun(
        incomplete,
        lambda client: (
            (job.id[:length], f"{job.view.state} {job.view.model} {job.view.name}".rstrip())
            for job in client.jobs(limit=LOOKED_THROUGH)
        ),
    )


def complete_run(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the ids and names of runs that begin so, each with how far the run is."""
    length = max(SHOWN_LENGTH, len(incomplete))
    return _begun(
        incomplete,
        lambda client: (
            (text, f"{run.view.model} {run.view.name}, step {run.num_steps}")
            for run in client.runs(limit=LOOKED_THROUGH)
            for text in (run.id[:length], run.view.name)
        ),
    )


def complete_store(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the names of stores that begin so, each with how many rows it has."""
    return _begun(
        incomplete,
        lambda client: (
            (text, f"{store.view.model}, {len(store)} rows")
            for store in client.stores()
            for text in (store.name, f"{store.view.owner}/{store.name}")
        ),
    )


def complete_model(ctx: typer.Context, args: list[str], incomplete: str) -> Completions:
    """Return the names of models that begin so, each with its size or why it cannot be used."""
    return _begun(
        incomplete,
        lambda client: (
            (model.name, f"{model.num_parameters:,} parameters" if model.usable else model.reason)
            for model in client.models()
        ),
    )


def _begun(incomplete: str, ask: Callable[[GradClient], Iterable[tuple[str, str]]]) -> Completions:
    """Return what begins so of the texts that a box knows, each with what is told of it."""
    # Only now: what defines the commands must import quickly, and without NumPy.
    from gradbox.client import GradClient
    from gradbox.http.connection import Retry

    try:
        with GradClient(timeout_s=TIMEOUT_S, retry=Retry(patience_s=0)) as client:
            found = list(ask(client))
    except GradboxError:
        return []
    return [(text, printable(told)) for text, told in found if text and text.startswith(incomplete)]
