"""Which job an id on the command line means: all of it, or a beginning that no other job has."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from gradbox.cli.completion import LOOKED_THROUGH, complete_job
from gradbox.client import GradClient
from gradbox.errors import InvalidRequest, JobNotFound, OwnerOnly
from gradbox.job import Job
from gradbox.protocol import JobView

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
