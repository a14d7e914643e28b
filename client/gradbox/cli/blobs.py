"""`gradbox blobs list | delete`: what this user has sent to the box."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from gradbox.cli.output import AsJson, ago, complain, say, say_json, say_views
from gradbox.client import GradClient
from gradbox.errors import BlobInUse
from gradbox.protocol import BlobView

commands: Final = typer.Typer(no_args_is_help=True)


@commands.command("list", help="your blobs, the one used last first")
def list_blobs(*, json: AsJson = False) -> int:
    """Print one line for each blob."""
    with GradClient() as client:
        views = sorted(client.blobs(), key=lambda view: view.used_s, reverse=True)
    return say_views(views, _row, titles=("DIGEST", "BYTES", "USED"), what="blobs", json=json)


def _row(view: BlobView) -> tuple[str, ...]:
    return view.digest, f"{view.size_bytes:,}", ago(view.used_s)


@commands.command("delete", help="delete blobs that no job needs")
def delete_blobs(
    digests: Annotated[
        list[str] | None, typer.Argument(metavar="DIGEST", help="as `blobs list` shows them")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="all that no job needs")] = False,
    json: AsJson = False,
) -> int:
    """Delete each blob; 1 if a job needs one that was named."""
    if everything == bool(digests):
        raise typer.BadParameter("expected either digests or --all")
    deleted, code = [], 0
    with GradClient() as client:
        for digest in digests or [view.digest for view in client.blobs()]:
            try:
                client.delete_blob(digest)
            except BlobInUse as error:
                if not everything:
                    complain(error)
                    code = 1
                continue
            deleted.append(digest)
    if json:
        say_json({"deleted": deleted})
    else:
        say(f"deleted {len(deleted)} blobs")
    return code
