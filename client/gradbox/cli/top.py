"""`gradbox top` and `gradbox workers`: devices and queue of the box, now or live."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gradbox.cli.box_tables import NARROW_TITLES, device_rows, headline, job_rows, read_box
from gradbox.cli.output import AsJson, coloured, say, say_json, say_table, table_of
from gradbox.http.connection import Connection
from gradbox.printable import printable
from gradbox.settings import find_settings

if TYPE_CHECKING:
    from rich.console import Group

LINES_BESIDE_JOBS: Final = 7

Once = Annotated[bool, typer.Option("--once", help="print it once, as where no terminal is")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.2, help="how often the box is asked")
]


def top(*, once: Once = False, every: Every = 1.0, json: AsJson = False) -> int:
    """Show devices and queue until `q` or Ctrl-C, or once."""
    connection = Connection(find_settings())
    try:
        if json:
            say_json(read_box(connection).model_dump(mode="json"))
        elif once or not sys.stdout.isatty():
            _say_once(connection)
        else:
            _live(connection, every_s=every)
    except KeyboardInterrupt:
        pass  # a way to leave it
    finally:
        connection.close()
    return 0


def workers(*, json: AsJson = False) -> int:
    """Print a line for every worker."""
    connection = Connection(find_settings())
    try:
        box = read_box(connection)
    finally:
        connection.close()
    if json:
        say_json([device.model_dump(mode="json") for device in box.devices], indent=2)
    elif box.devices:
        say_table(device_rows(box))
    else:
        say("no workers")
    return 0


def _say_once(connection: Connection) -> None:
    box = read_box(connection)
    say(headline(box, url=connection.url))
    for rows in (device_rows(box, titles=NARROW_TITLES), job_rows(box)):
        if len(rows) > 1:
            say("")
            say_table(rows)


def _live(connection: Connection, *, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, no_color=not coloured(sys.stdout))
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        while True:
            live.update(_picture(connection, height=console.height), refresh=True)
            if pressed(every_s) in ("q", "Q"):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give what waits for a key so many seconds and returns it; "" if none was pressed."""

    def no_key(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    if not sys.stdin.isatty() or os.name != "posix":
        yield no_key
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 1).decode(errors="replace") if ready else ""

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _picture(connection: Connection, *, height: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    box = read_box(connection)
    most = max(1, height - LINES_BESIDE_JOBS - len(box.devices))
    title = Text(printable(headline(box, url=connection.url), lines=True), style="bold")
    devices = table_of(device_rows(box, titles=NARROW_TITLES))
    return Group(title, "", devices, "", table_of(job_rows(box, most=most)))
