"""`gradbox tokens`: who may use the box."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.exits import DONE, WRONG_USAGE
from gradbox.cli.output import AsJson, say_table
from gradbox.html import local
from gradbox_service.commands.beside_the_box import DataFolder, RedisUrl, at_redis, beside_the_box
from gradbox_service.database.connection import connect
from gradbox_service.identity.tokens import Tokens


def register(app: typer.Typer) -> None:
    """Add `gradbox tokens`."""
    tokens = typer.Typer(help="create, list and revoke tokens of this box", no_args_is_help=True)
    tokens.command("create", help="make a token; it is shown this once")(create)
    tokens.command("list", help="list the tokens")(list_tokens)
    tokens.command("revoke", help="make a token worthless")(revoke)
    app.add_typer(tokens, name="tokens")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="whose jobs these will be")],
    *,
    admin: Annotated[
        bool, typer.Option("--admin", help="for the box's owner: everybody's jobs, and priority")
    ] = False,
    redis_url: RedisUrl = None,
    data: DataFolder = None,
    json: AsJson = False,
) -> int:
    """Make a token and print it."""
    with _tokens(redis_url, data) as tokens:
        token = tokens.create(name, admin=admin)
    if json:
        print(jsons.dumps({"name": name, "admin": admin, "token": token}))
    else:
        print(token)
        print("It is not stored and cannot be shown again.", file=sys.stderr)
    return DONE


def list_tokens(
    *, redis_url: RedisUrl = None, data: DataFolder = None, json: AsJson = False
) -> int:
    """Print what is known of every token."""
    with _tokens(redis_url, data) as tokens:
        found = tokens.list()
    if json:
        print(jsons.dumps([info.model_dump() for info in found]))
        return DONE
    rows = [
        (info.id, local(info.created_s), "admin" if info.admin else "user", info.name)
        for info in found
    ]
    say_table([("ID", "CREATED", "ROLE", "NAME"), *rows])
    return DONE


def revoke(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="the token's id, or the name that its tokens have"),
    ],
    *,
    redis_url: RedisUrl = None,
    data: DataFolder = None,
    json: AsJson = False,
) -> int:
    """Revoke by id or name."""
    with _tokens(redis_url, data) as tokens:
        num_revoked = tokens.revoke(name)
    if json:
        print(jsons.dumps({"revoked": num_revoked}))
    elif num_revoked:
        print(f"revoked {num_revoked}")
    if not num_revoked:
        print(f"gradbox tokens: no token has the id or name {name!r}", file=sys.stderr)
        return WRONG_USAGE
    return DONE


@contextmanager
def _tokens(redis_url: str | None, data: Path | None) -> Iterator[Tokens]:
    """Give the tokens in the Redis that a command's options name."""
    with beside_the_box(), closing(connect(at_redis(redis_url, data))) as connection:
        yield Tokens(connection)
