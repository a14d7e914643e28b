"""What the commands print: text made printable, and JSON in ASCII.

Every command prints by these, because names, states and problems come from the box and others on
it; see `gradbox.printable`.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from gradbox.printable import printable

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def say(text: object) -> None:
    """Print lines of text to stdout, at once."""
    print(printable(text, lines=True), flush=True)


def complain(text: object) -> None:
    """Print an error to stderr; its second line and those after it are indented, being details."""
    first, *details = printable(text, lines=True).split("\n")
    print("\n  ".join([f"gradbox: {first}", *details]), file=sys.stderr)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print a JSON value to stdout, every character outside ASCII escaped."""
    print(json.dumps(value, indent=indent), flush=True)


def say_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns, the first row being the titles."""
    table = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        say("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
