"""`gradbox service` and `gradbox tokens`: the service's part of the command line."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from gradbox_service.jobs.connection import connect
from gradbox_service.jobs.refusals import store_refuses
from gradbox_service.revocations import NotRevoked, Revocations
from gradbox_service.settings import EMBEDDED, BadSettings, Settings, add_arguments, given_in
from gradbox_service.tokens import BadTokenName, RedisTokens
from gradbox_service.up.embedded_redis import url_in

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DONE, WRONG_USAGE, UNREACHABLE = 0, 2, 3


def register_service(subparsers: Subparsers) -> None:
    """Add `gradbox service`."""
    parser = subparsers.add_parser("service", help="run the HTTP service alone")
    add_arguments(parser, leave_out=EMBEDDED)
    parser.add_argument("--fd", type=int, help="a listening socket to use, by its number")
    parser.set_defaults(func=run_service)


def register_tokens(subparsers: Subparsers) -> None:
    """Add `gradbox tokens`."""
    parser = subparsers.add_parser("tokens", help="create, list and revoke tokens of this box")
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="make a token; it is shown this once")
    create.add_argument("name", help="whose jobs these will be")
    create.add_argument(
        "--admin", action="store_true", help="for the box's owner: everybody's jobs, and priority"
    )
    listing = actions.add_parser("list", help="list the tokens")
    revoke = actions.add_parser("revoke", help="make a token worthless")
    revoke.add_argument("name", help="the token's id, or the name that all of its tokens have")
    for action, function in (
        (create, create_token),
        (listing, list_tokens),
        (revoke, revoke_token),
    ):
        action.add_argument("--redis-url", help="address of Redis (GRADBOX_REDIS_URL)")
        action.add_argument("--data", type=Path, help="data folder of a running `gradbox up`")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(func=partial(_with_tokens, function))


def run_service(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    from gradbox.printable import log_to_stderr
    from gradbox_service.http.listening import CannotListen
    from gradbox_service.http.server import serve

    log_to_stderr()
    try:
        settings = Settings.read(**given_in(args))
        serve(
            settings,
            listening=lambda url: print(f"gradbox service at {url}", flush=True),
            bound=None if args.fd is None else socket.socket(fileno=args.fd),
        )
    except (BadSettings, CannotListen) as error:
        print(f"gradbox service: {error}", file=sys.stderr)
        return WRONG_USAGE
    return DONE


TokenCommand = Callable[[RedisTokens, argparse.Namespace], int]


def _with_tokens(function: TokenCommand, args: argparse.Namespace) -> int:
    """Run one of the commands below against the Redis that the arguments name."""
    try:
        connection = connect(redis_url(args))
        try:
            revocations = Revocations(Settings.read(data=args.data).data)
            return function(RedisTokens(connection, revocations=revocations), args)
        finally:
            connection.close()
    except (BadSettings, BadTokenName) as error:
        print(f"gradbox tokens: {error}", file=sys.stderr)
        return WRONG_USAGE
    except NotRevoked as error:
        print(f"gradbox tokens: {error}", file=sys.stderr)
        return UNREACHABLE
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        print(
            f"gradbox tokens: Redis cannot be reached, or takes nothing for now: {error}; try "
            "again once it runs and its disk and memory have room (`gradbox storage`)",
            file=sys.stderr,
        )
        return UNREACHABLE


def redis_url(args: argparse.Namespace) -> str:
    """Return --redis-url, else the Redis of the `gradbox up` that runs on this data folder."""
    settings = Settings.read(redis_url=args.redis_url, data=args.data)
    if args.redis_url is None and args.data is not None:
        return url_in(settings.data / "redis")
    return settings.redis_url or url_in(settings.data / "redis")


def create_token(tokens: RedisTokens, args: argparse.Namespace) -> int:
    """Make a token and print it."""
    token = tokens.create(args.name, admin=args.admin)
    if args.json:
        print(json.dumps({"name": args.name, "admin": args.admin, "token": token}))
    else:
        print(token)
        print("It is not stored and cannot be shown again.", file=sys.stderr)
    return DONE


def list_tokens(tokens: RedisTokens, args: argparse.Namespace) -> int:
    """Print what is known of every token."""
    found = tokens.list()
    if args.json:
        print(json.dumps([info.model_dump() for info in found]))
        return DONE
    for info in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created_s))
        print(f"{info.id}  {made}  {'admin' if info.admin else 'user':5}  {info.name}")
    return DONE


def revoke_token(tokens: RedisTokens, args: argparse.Namespace) -> int:
    """Revoke by id or name."""
    num_revoked = tokens.revoke(args.name)
    if args.json:
        print(json.dumps({"revoked": num_revoked}))
    elif num_revoked:
        print(f"revoked {num_revoked}")
    if not num_revoked:
        print(f"gradbox tokens: no token has the id or name {args.name!r}", file=sys.stderr)
        return WRONG_USAGE
    return DONE
