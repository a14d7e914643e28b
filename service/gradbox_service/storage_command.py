"""`gradbox storage`: what the box's files take, by owner, and cleaning by hand.

It works on the box's own data folder and Redis, so it runs on the box's machine, as its owner.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import redis

from gradbox.printable import printable
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.cleaning.expiry import Stored
from gradbox_service.commands import DONE, UNREACHABLE, WRONG_USAGE, redis_url
from gradbox_service.jobs.refusals import store_refuses
from gradbox_service.settings import DAY_S, BadSettings, Settings
from gradbox_service.store.room import in_units

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}


def register(subparsers: Subparsers) -> None:
    """Join the `gradbox` command."""
    parser = subparsers.add_parser(
        "storage", help="what the box's files take, by owner; `storage clean` removes some"
    )
    _add_shared(parser)
    parser.set_defaults(func=partial(_with_cleaner, show))
    actions = parser.add_subparsers(dest="action")
    clean = actions.add_parser("clean", help="remove what was not used for some time")
    clean.add_argument(
        "--older-than",
        type=_seconds,
        required=True,
        metavar="AGE",
        help="remove what was last used longer ago: 90m, 12h, 3d",
    )
    clean.add_argument("--owner", help="only what counts against this owner")
    clean.add_argument("--only", choices=["results", "blobs"], help="only these")
    clean.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")
    _add_shared(clean, default=argparse.SUPPRESS)
    clean.set_defaults(func=partial(_with_cleaner, clean_by_hand))


def _add_shared(parser: argparse.ArgumentParser, **given: Any) -> None:
    parser.add_argument("--redis-url", help="address of Redis (GRADBOX_REDIS_URL)", **given)
    parser.add_argument(
        "--data", type=Path, help="data folder of a running `gradbox up` (GRADBOX_DATA)", **given
    )
    parser.add_argument("--json", action="store_true", help="print JSON", **given)


StorageCommand = Callable[[Backing, Cleaner, argparse.Namespace], int]


def _with_cleaner(function: StorageCommand, args: argparse.Namespace) -> int:
    """Run one of the commands below on the box that the arguments name."""
    try:
        settings = Settings.read(redis_url=redis_url(args), data=args.data)
        box = Backing.on_redis(settings)
        cleaner = Cleaner(
            settings,
            records=box.records,
            blobs=box.blobs,
            results=box.results,
            owners=box.owners,
            tokens=box.tokens,
            leadership=box.leadership,
        )
        return function(box, cleaner, args)
    except BadSettings as error:
        print(f"gradbox storage: {error}", file=sys.stderr)
        return WRONG_USAGE
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        print(
            f"gradbox storage: Redis cannot be reached, or takes nothing for now: {error}; is "
            f"--data the folder of a running `gradbox up`? On a full disk, move something else "
            f"away first",
            file=sys.stderr,
        )
        return UNREACHABLE


def show(box: Backing, cleaner: Cleaner, args: argparse.Namespace) -> int:
    """Print what blobs and results take, by owner, and what is left."""
    blobs, results = box.owners.totals(), box.records.result_bytes()
    owners = sorted({*blobs, *results}, key=lambda o: -blobs.get(o, 0) - results.get(o, 0))
    left_bytes, free_bytes = box.blobs.room.left_bytes(), box.blobs.room.free_bytes()
    memory = box.records.memory()
    if args.json:
        report = {
            "owners": [
                {"owner": o, "blob_bytes": blobs.get(o, 0), "result_bytes": results.get(o, 0)}
                for o in owners
            ],
            "free_bytes": free_bytes,
            "reserve_bytes": free_bytes - left_bytes,
            "redis_bytes": memory.used_bytes,
            "redis_bound_bytes": memory.bound_bytes,
        }
        print(json.dumps(report))
        return DONE
    print(f"{'owner':30} {'blobs':>12} {'results':>12}")
    for owner in owners:
        sizes = (in_units(blobs.get(owner, 0)), in_units(results.get(owner, 0)))
        print(f"{printable(owner):30} {sizes[0]:>12} {sizes[1]:>12}")
    print(f"free on the disk: {in_units(free_bytes)}, of it {in_units(left_bytes)} above reserve")
    bound = "" if memory.bound_bytes is None else f" of {in_units(memory.bound_bytes)}"
    print(f"in Redis: {in_units(memory.used_bytes)}{bound}")
    return DONE


def clean_by_hand(box: Backing, cleaner: Cleaner, args: argparse.Namespace) -> int:
    """Remove what the arguments choose, but nothing that a job needs."""
    chosen = _chosen(cleaner, args)
    gone = chosen if args.dry_run else cleaner.remove(chosen)
    total_bytes = sum(file.size_bytes for file in gone)
    if args.json:
        print(json.dumps({"removed": [vars(file) for file in gone], "bytes": total_bytes}))
        return DONE
    for file in gone:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used_s))
        size = in_units(file.size_bytes)
        print(f"{file.kind:6} {file.name}  {size:>10}  {used}  {printable(file.owner)}")
    verb = "would remove" if args.dry_run else "removed"
    print(f"{verb} {len(gone)} files of {in_units(total_bytes)}")
    return DONE


def _chosen(cleaner: Cleaner, args: argparse.Namespace) -> Sequence[Stored]:
    before_s = time.time() - args.older_than
    needed = cleaner.needed()
    return [
        file
        for file in sorted(cleaner.stored(), key=lambda file: file.used_s)
        if file.used_s < before_s
        and file.name not in needed
        and args.owner in (None, file.owner)
        and args.only in (None, f"{file.kind}s")
    ]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected an age such as 90m, 12h or 3d, got {text!r}")
    return float(found[1]) * SECONDS[found[2]]
