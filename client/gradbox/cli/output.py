"""What the commands print: text made printable, tables, times, and JSON in ASCII.

Every command prints by these, because names, states and problems come from the box and others on
it; see `gradbox.printable`. Colour is for terminals alone, and NO_COLOR turns it off
(https://no-color.org).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from gradbox.printable import printable

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

View = TypeVar("View", bound="BaseModel")

# As much of a job's id as tables on a terminal show.
SHOWN_LENGTH: Final = 12

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Everybodys = Annotated[bool, typer.Option("--all", help="everybody's; for the box's owner")]
Limit = Annotated[int, typer.Option(metavar="N", help="at most so many")]

# How rich draws a cell that holds one of these words.
STYLES: Final[Mapping[str, str]] = {
    "running": "cyan",
    "busy": "cyan",
    "done": "green",
    "ok": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "draining": "yellow",
    "starting": "yellow",
}


def say(text: object) -> None:
    """Print lines of text to stdout, at once."""
    print(printable(text, lines=True), flush=True)


def complain(text: object) -> None:
    """Print an error to stderr; its second line and those after it are indented, being details."""
    first, *details = printable(text, lines=True).split("\n")
    program = styled("gradbox:", "red", stream=sys.stderr)
    print("\n  ".join([f"{program} {first}", *details]), file=sys.stderr)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print a JSON value to stdout, every character outside ASCII escaped."""
    print(json.dumps(value, indent=indent), flush=True)


def say_views(
    views: Sequence[View],
    row: Callable[[View], Sequence[str]],
    *,
    titles: Sequence[str],
    what: str,
    json: bool,
) -> int:
    """Print a line for each, or all as JSON; `what` they are is said where there are none."""
    if json:
        say_json([view.model_dump(mode="json") for view in views], indent=2)
    elif views:
        say_table([titles, *map(row, views)])
    else:
        say(f"no {what}")
    return 0


def say_view(view: BaseModel, *, json: bool) -> int:
    """Print all that the box says of one thing."""
    if json:
        say_json(view.model_dump(mode="json"))
        return 0
    from gradbox.html import fields_of_view  # takes pydantic, which `--help` waits for otherwise

    facts, tables = fields_of_view(view, most=sys.maxsize)
    for name, text in facts.items():
        # A problem has several lines; all other text is somebody's, and stays on one.
        lines = printable(text, lines=name == "error").split("\n")
        say(f"\n{'':17}".join([f"{name:<16} {lines[0]}", *lines[1:]]))
    for name, rows in tables.items():
        say(f"\n{name}:")
        say_table(rows)
    return 0


def say_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first row being the titles."""
    if coloured(sys.stdout):
        from rich.console import Console

        Console(highlight=False).print(table_of(rows))
        return
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        say("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """Return rows, the first being the titles, as a table that rich draws."""
    from rich.table import Table
    from rich.text import Text

    titles, *lines = rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(printable(title), no_wrap=True)
    for line in lines:
        cells = [printable(cell) for cell in line]
        table.add_row(*(Text(cell, style=STYLES.get(cell.partition(",")[0], "")) for cell in cells))
    return table


def styled(text: str, colour: str, *, stream: IO[str]) -> str:
    """Return text in bold colour where the stream is a terminal that takes it."""
    return typer.style(text, fg=colour, bold=True) if coloured(stream) else text


def coloured(stream: IO[str]) -> bool:
    """Tell whether what is printed to the stream may be coloured."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86400


def duration(seconds: float) -> str:
    """Return a duration in two units at most: `4 s`, `3 min`, `1 h 04 min`, `2 d 5 h`."""
    whole = max(0, round(seconds))
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def brief(seconds: float) -> str:
    """Return how long something took, which may be less than a second: `21 ms`, `2.5 s`."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def ago(time_s: float, *, now_s: float | None = None) -> str:
    """Return how long ago a time was, given in seconds since 1970."""
    return f"{duration((time.time() if now_s is None else now_s) - time_s)} ago"
