"""`gradbox service` and `gradbox tokens`: the service's part of the command line."""

from __future__ import annotations

import json as jsons
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import redis
import typer

from gradbox.cli.exits import DONE, UNREACHABLE, WRONG_USAGE
from gradbox.cli.output import AsJson, say_table
from gradbox.cli.times import local
from gradbox_service.jobs.connection import connect
from gradbox_service.jobs.refusals import store_refuses, why_refused
from gradbox_service.revocations import NotRevoked, Revocations
from gradbox_service.settings import (
    EMBEDDED,
    BadSettings,
    Settings,
    make_files_private,
    takes_settings,
)
from gradbox_service.tokens import BadTokenName, RedisTokens, lookalikes, token_id
from gradbox_service.up.embedded_redis import url_in

RedisUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="address of Redis (GRADBOX_REDIS_URL)")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="data folder of a running `gradbox up` (GRADBOX_DATA)"),
]


def register_service(app: typer.Typer) -> None:
    """Add `gradbox service`."""
    app.command("service", help="run the HTTP service alone")(run_service)


def register_tokens(app: typer.Typer) -> None:
    """Add `gradbox tokens`."""
    tokens = typer.Typer(help="create, list and revoke tokens of this box", no_args_is_help=True)
    tokens.command("create", help="make a token; it is shown this once")(create)
    tokens.command("list", help="list the tokens")(list_tokens)
    tokens.command("revoke", help="make a token worthless")(revoke)
    app.add_typer(tokens, name="tokens")


@takes_settings(leave_out=EMBEDDED)
def run_service(
    given: dict[str, Any],
    *,
    fd: Annotated[
        int | None, typer.Option(metavar="N", help="a listening socket to use, by its number")
    ] = None,
) -> int:
    """Serve until stopped."""
    from gradbox.printable import log_to_stderr
    from gradbox_service.http.listening import CannotListen
    from gradbox_service.http.server import serve

    log_to_stderr()
    make_files_private()
    try:
        settings = Settings.read(**given)
        serve(
            settings,
            listening=lambda url: print(f"gradbox service at {url}", flush=True),
            bound=None if fd is None else socket.socket(fileno=fd),
        )
    except (BadSettings, CannotListen) as error:
        print(f"gradbox service: {error}", file=sys.stderr)
        return WRONG_USAGE
    return DONE


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

    def run(tokens: RedisTokens) -> int:
        names = [info.name for info in tokens.list()]
        token = tokens.create(name, admin=admin)
        for other in lookalikes(name, names):
            print(
                f"gradbox tokens: {name!r} looks like {other!r}, who has a token too; they are two "
                f"owners: if one person is meant, `gradbox tokens revoke {token_id(token)}` and "
                f"make it for {other!r}",
                file=sys.stderr,
            )
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

    def run(tokens: RedisTokens) -> int:
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

    def run(tokens: RedisTokens) -> int:
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


def at_redis(redis_url: str | None, data: Path | None) -> str:
    """Return --redis-url, else the Redis of the `gradbox up` that runs on this data folder."""
    settings = Settings.read(redis_url=redis_url, data=data)
    if redis_url is None and data is not None:
        return url_in(settings.data / "redis")
    return settings.redis_url or url_in(settings.data / "redis")


def _with_tokens(
    run: Callable[[RedisTokens], int], redis_url: str | None, data: Path | None
) -> int:
    """Run one of the commands above against the Redis that its options name."""

    def run_on_redis() -> int:
        with closing(connect(at_redis(redis_url, data))) as connection:
            revocations = Revocations(Settings.read(data=data).data)
            return run(RedisTokens(connection, revocations=revocations))

    return beside_the_box("tokens", run_on_redis)


def beside_the_box(command: str, run: Callable[[], int]) -> int:
    """Run a command that needs the box's own Redis; where it cannot be done, say why.

    Returns:
        What `run` returns, or the exit code of why it did not.
    """
    try:
        return run()
    except (BadSettings, BadTokenName) as error:
        said, code = str(error), WRONG_USAGE
    except NotRevoked as error:
        said, code = str(error), UNREACHABLE
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        said, code = f"Redis {why_refused(error)}", UNREACHABLE
        if isinstance(error, redis.ConnectionError):
            here = "is --data the folder of a running `gradbox up`?"
            said = f"Redis cannot be reached: {error}; {here}"
    print(f"gradbox {command}: {said}", file=sys.stderr)
    return code
