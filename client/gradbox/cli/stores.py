"""`gradbox stores list | show | grant | revoke | export | delete`: rows that stay on the box."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gradbox.cli.completion import complete_store
from gradbox.cli.output import AsJson, ago, say, say_view, say_views
from gradbox.client import GradClient
from gradbox.html import size
from gradbox.protocol import StoreView
from gradbox.stores.rows import Form

TITLES: Final = ("NAME", "OWNER", "MODEL", "ROWS", "NUMBERS", "SIZE", "USED")

commands: Final = typer.Typer(no_args_is_help=True)

_ARGUMENT: Final[dict[str, Any]] = {
    "metavar": "STORE",
    "help": "NAME of a store of yours, or OWNER/NAME",
    "autocompletion": complete_store,
}
Store = Annotated[str, typer.Argument(**_ARGUMENT)]
People = Annotated[
    list[str], typer.Argument(metavar="WHO", help="names of tokens; '*' is everybody")
]


@commands.command("list", help="stores that you may read, newest first")
def list_stores(*, json: AsJson = False) -> int:
    """Print one line for each store."""
    with GradClient() as client:
        views = [store.view for store in client.stores()]
    return say_views(views, _row, titles=TITLES, what="stores", json=json)


@commands.command("show", help="one store, and who may read it")
def show_store(store: Store, *, json: AsJson = False) -> int:
    """Print all that the box says of a store."""
    with GradClient() as client:
        return say_view(client.find_store(store).view, json=json)


@commands.command("grant", help="let people read and query a store of yours")
def grant_store(store: Store, people: People) -> int:
    """Add to those who may read it."""
    with GradClient() as client:
        found = client.find_store(store)
        found.grant(*people)
    say(f"{found.name} may be read by {', '.join(found.view.grants)}")
    return 0


@commands.command("revoke", help="let people no longer read a store of yours, from now on")
def revoke_store(store: Store, people: People) -> int:
    """Remove from those who may read it."""
    with GradClient() as client:
        found = client.find_store(store)
        found.revoke(*people)
    say(f"{found.name} may be read by {', '.join(found.view.grants) or 'nobody else'}")
    return 0


@commands.command("export", help="write a store's rows into a new folder")
def export_store(
    store: Store,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="made anew")],
    form: Annotated[Form, typer.Option(help="safetensors files, or what bergson opens")] = (
        "safetensors"
    ),
) -> int:
    """Fetch all rows with their ids and losses."""
    if output.exists():
        raise typer.BadParameter(f"expected a folder that is not there yet, got {output}")
    with GradClient() as client:
        found = client.find_store(store)
        found.export(output, form=form)
    say(f"{output}: {len(found)} rows as {form}")
    return 0


@commands.command("delete", help="delete a store of yours with its rows")
def delete_store(store: Store) -> int:
    """Delete a store."""
    with GradClient() as client:
        client.find_store(store).delete()
    say(f"{store} deleted")
    return 0


def _row(view: StoreView) -> tuple[str, ...]:
    return (
        view.name,
        view.owner,
        view.model,
        str(view.num_rows),
        str(view.num_columns or ""),
        size(view.size_bytes),
        ago(view.used_s),
    )
