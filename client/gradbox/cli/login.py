"""`gradbox login`: keep a box's address and token on this machine."""

from __future__ import annotations

import argparse
import getpass
import sys
from typing import Any

from gradbox.cli.output import say
from gradbox.errors import Unauthorized
from gradbox.settings import ClientSettings, checked_url, login_file, write_settings


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "login", help="keep a box's URL and token on this machine"
    )
    parser.add_argument("--url", help="the box's address; asked for if it is not given")
    parser.add_argument(
        "--token",
        help="the token, or - to read it from stdin; asked for if it is not given, and better so: "
        "arguments show in process lists",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Try the token on the box, then write it to a file that nobody else can read."""
    from gradbox.client import GradClient

    settings = _asked_for(args)
    with GradClient(settings.url, settings.token) as client:
        client.jobs(limit=1)
    path = login_file()
    write_settings(path, settings)
    say(f"{settings.url} knows this token; kept in {path}")
    return 0


def _asked_for(args: argparse.Namespace) -> ClientSettings:
    """Return what was given, and what is typed for the rest.

    Raises:
        ServiceUnavailable: see `checked_url`.
        Unauthorized: the input ended before there was a token.
    """
    token = ""
    try:
        url = checked_url(args.url or input("URL of the box: ").strip())
        token = args.token or getpass.getpass("token: ")
    except EOFError:
        pass
    if token == "-":
        token = sys.stdin.readline()
    if not token.strip():
        raise Unauthorized(
            "expected a URL and a token, but the input ended before they were there: give "
            "--url URL, and --token - with the token on stdin"
        )
    return ClientSettings(url=url, token=token.strip())
