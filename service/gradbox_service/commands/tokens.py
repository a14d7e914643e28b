"""`gradbox tokens`: who may use the box."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.exits import DONE, WRONG_USAGE
from gradbox.cli.output import AsJson, local, say_table
from gradbox_service.commands.beside_the_box import DataFolder, RedisUrl, at_redis, beside_the_box
from gradbox_service.database.connection import connect
from gradbox_service.identity.revocations import Revocations
from gradbox_service.identity.tokens import Tokens
from gradbox_service.settings import Settings


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

    def run(tokens: Tokens) -> int:
        token = tokens.create(name, admin=admin)
        if json:
            print(jsons.dumps({"name": name, "admin": admin, "token": token}))
        else:
            print(token)
            print("It is not stored and cannot be shown again.", file=sys.stderr)
        return DONE

    return _with_tokens(run, redis_url, data)


def list_tokens(
    *, redis_url: RedisUrl = None, data: DataFolder = None, json: AsJson = False
) -> int:
    """Print what is known of every token."""

    def run(tokens: Tokens) -> int:
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

    return _with_tokens(run, redis_url, data)


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

    def run(tokens: Tokens) -> int:
        num_revoked = tokens.revoke(name)
        if json:
            print(jsons.dumps({"revoked": num_revoked}))
        elif num_revoked:
            print(f"revoked {num_revoked}")
        if not num_revoked:
            print(f"gradbox tokens: no token has the id or name {name!r}", file=sys.stderr)
            return WRONG_USAGE
        return DONE

    return _with_tokens(run, redis_url, data)


def _with_tokens(run: Callable[[Tokens], int], redis_url: str | None, data: Path | None) -> int:
    """Run one of the commands above against the Redis that its options name."""

    def run_on_redis() -> int:
        with closing(connect(at_redis(redis_url, data))) as connection:
            revocations = Revocations(Settings.read(data=data).data)
            return run(Tokens(connection, revocations=revocations))

    return beside_the_box("tokens", run_on_redis)
