"""`gradbox service`: the HTTP service alone."""

from __future__ import annotations

import socket
from typing import Annotated, Any

import typer

from gradbox.cli.exits import DONE
from gradbox_service.settings import (
    EMBEDDED,
    Settings,
    make_files_private,
    takes_settings,
)


def register(app: typer.Typer) -> None:
    """Add `gradbox service`."""
    app.command("service", help="run the HTTP service alone")(run_service)


@takes_settings(leave_out=EMBEDDED)
def run_service(
    given: dict[str, Any],
    *,
    fd: Annotated[
        int | None, typer.Option(metavar="N", help="a listening socket to use, by its number")
    ] = None,
) -> int:
    """Serve until stopped."""
    from gradbox.printable import log_to_stderr
    from gradbox_service.http.server import serve

    log_to_stderr()
    make_files_private()
    serve(
        Settings.read(**given),
        listening=lambda url: print(f"gradbox service at {url}", flush=True),
        bound=None if fd is None else socket.socket(fileno=fd),
    )
    return DONE
