"""`gradbox login`: keep a box's address and token on this machine."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from gradbox.cli.output import say
from gradbox.errors import Unauthorized
from gradbox.settings import ClientSettings, checked_url, login_file, write_settings

Url = Annotated[
    str | None, typer.Option(metavar="URL", help="the box's address; asked for if not given")
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help="the token, or - to read it from stdin; asked for if it is not given, and better so: "
        "arguments show in process lists",
    ),
]


def run(*, url: Url = None, token: Token = None) -> int:
    """Try the token on the box, then write it to a file that nobody else can read."""
    from gradbox.client import GradClient

    settings = _asked_for(url, token)
    with GradClient(settings.url, settings.token) as client:
        client.jobs(limit=1)
    path = login_file()
    write_settings(path, settings)
    say(f"{settings.url} knows this token; kept in {path}")
    return 0


def _asked_for(url: str | None, token: str | None) -> ClientSettings:
    """Return what was given, and what is typed for the rest.

    Raises:
        ServiceUnavailable: see `checked_url`.
        Unauthorized: the input ended before there was a token.
    """
    try:
        url = checked_url(url or input("URL of the box: ").strip())
        token = token or getpass.getpass("token: ")
    except EOFError:
        token = None
    if token == "-":
        token = sys.stdin.readline()
    if not (url and token and token.strip()):
        raise Unauthorized(
            "expected a URL and a token, but the input ended before they were there: give "
            "--url URL, and --token - with the token on stdin"
        )
    return ClientSettings(url=url, token=token.strip())
