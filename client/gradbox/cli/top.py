"""`gradbox top` and `gradbox workers`: devices and queue of the box, now or live."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gradbox.cli.box_tables import device_rows, headline, job_rows, read_box
from gradbox.cli.output import AsJson, coloured, say, say_json, say_table, table_of
from gradbox.http.connection import Connection
from gradbox.printable import printable
from gradbox.settings import find_settings

if TYPE_CHECKING:
    from rich.console import Group

LINES_BESIDE_JOBS: Final = 6

Once = Annotated[bool, typer.Option("--once", help="print it once, as where no terminal is")]
Every = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.2, help="how often the box is asked")
]


def register_top(app: typer.Typer) -> None:
    """Add `gradbox top`."""
    app.command("top", help="devices and queue, live")(top)


def register_workers(app: typer.Typer) -> None:
    """Add `gradbox workers`."""
    app.command("workers", help="the box's workers, each with its device and job")(workers)


def top(*, once: Once = False, every: Every = 1.0, json: AsJson = False) -> int:
    """Show devices and queue until Ctrl-C, or once."""
    connection = Connection(find_settings())
    try:
        if json:
            box, operation = read_box(connection)
            say_json({"operation": operation.model_dump(mode="json")} | box.model_dump(mode="json"))
        elif once or not sys.stdout.isatty():
            _say_once(connection)
        else:
            _live(connection, every_s=every)
    except KeyboardInterrupt:
        pass  # the way to leave it
    finally:
        connection.close()
    return 0


def workers(*, json: AsJson = False) -> int:
    """Print a line for every worker."""
    connection = Connection(find_settings())
    try:
        box, _ = read_box(connection)
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
    box, operation = read_box(connection)
    say(headline(box, operation, url=connection.url))
    for rows in (device_rows(box), job_rows(box)):
        if len(rows) > 1:
            say("")
            say_table(rows)


def _live(connection: Connection, *, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, no_color=not coloured(sys.stdout))
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(connection, height=console.height), refresh=True)
            time.sleep(every_s)


def _picture(connection: Connection, *, height: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    box, operation = read_box(connection)
    most = max(1, height - LINES_BESIDE_JOBS - len(box.devices))
    title = Text(printable(headline(box, operation, url=connection.url)), style="bold")
    return Group(title, "", table_of(device_rows(box)), "", table_of(job_rows(box, most=most)))
