"""`gradbox version`."""

from __future__ import annotations

import argparse
from importlib import metadata
from typing import Any

from gradbox.cli.output import say, say_json
from gradbox.protocol import PROTOCOL


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("version", help="say which gradbox")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(func=run)


def text() -> str:
    """Return the version as one line."""
    return f"gradbox {metadata.version('gradbox')}, protocol {PROTOCOL}"


def run(args: argparse.Namespace) -> int:
    if args.json:
        say_json({"gradbox": metadata.version("gradbox"), "protocol": PROTOCOL})
    else:
        say(text())
    return 0
