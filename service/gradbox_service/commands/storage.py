"""`gradbox storage`: what the box's files take, by owner, and cleaning by hand.

It works on the box's own data folder and Redis, so it runs on the box's machine, as its owner.
"""

from __future__ import annotations

import json as jsons
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from gradbox.cli.exits import DONE, JOB_FAILED
from gradbox.cli.output import AsJson, say_table
from gradbox.printable import printable
from gradbox.settings import noted_reserve_bytes
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.cleaning.expiry import Stored
from gradbox_service.commands.beside_the_box import DataFolder, RedisUrl, at_redis, beside_the_box
from gradbox_service.settings import DAY_S, Settings
from gradbox_service.store.files import sha256_of
from gradbox_service.store.room import in_units

SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}


class Kind(StrEnum):
    """What `storage clean --only` takes."""

    RESULTS = "results"
    BLOBS = "blobs"


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    storage = typer.Typer(
        help="what the box's files take, by owner; `storage clean` removes some",
        invoke_without_command=True,
    )
    storage.callback()(show)
    storage.command("clean", help="remove what was not used for some time")(clean)
    storage.command("verify", help="read all blobs and results, and list the damaged")(verify)
    app.add_typer(storage, name="storage")


def show(
    ctx: typer.Context,
    *,
    redis_url: RedisUrl = None,
    data: DataFolder = None,
    json: AsJson = False,
) -> int:
    """Print what blobs, results and states of runs take, by owner, and what is left."""
    if ctx.invoked_subcommand is not None:
        # What stands before `clean` or `verify` is meant for it as well.
        before = {"redis_url": redis_url, "data": data, "json": json}
        ctx.default_map = {ctx.invoked_subcommand: before}
        return DONE
    with _box(redis_url, data) as (box, _):
        return _print_owners(box, json=json)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise typer.BadParameter(f"expected an age such as 90m, 12h or 3d, got {text!r}")
    return float(found[1]) * SECONDS[found[2]]


def clean(
    *,
    older_than: Annotated[
        float,
        typer.Option(
            parser=_seconds,
            metavar="AGE",
            help="remove what was last used longer ago: 90m, 12h, 3d",
        ),
    ],
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="only what counts against this owner")
    ] = None,
    only: Annotated[Kind | None, typer.Option(help="only these")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="remove nothing, say what would go")
    ] = False,
    redis_url: RedisUrl = None,
    data: DataFolder = None,
    json: AsJson = False,
) -> int:
    """Remove what the arguments choose, but nothing that a job needs."""
    with _box(redis_url, data) as (_, cleaner):
        before_s = time.time() - older_than
        chosen = _chosen(cleaner, before_s=before_s, owner=owner, only=only)
        gone = chosen if dry_run else cleaner.remove(chosen)
    _print_gone(gone, dry_run=dry_run, json=json)
    return DONE


def verify(*, redis_url: RedisUrl = None, data: DataFolder = None, json: AsJson = False) -> int:
    """Compare every blob and every result with its SHA-256; 1 if some have another."""
    with _box(redis_url, data) as (box, cleaner):
        stored = list(cleaner.stored())
        damaged = [file for file in stored if _is_damaged(file, box)]
    if json:
        print(jsons.dumps({"compared": len(stored), "damaged": [vars(f) for f in damaged]}))
    else:
        _print_files(damaged)
        total = in_units(sum(file.size_bytes for file in stored))
        print(f"compared {len(stored)} files of {total}: {len(damaged)} damaged")
        if damaged:
            print("a damaged blob is sent again with the next job; run jobs again for results")
    return JOB_FAILED if damaged else DONE


def _is_damaged(file: Stored, box: Backing) -> bool:
    """Return whether a file has another SHA-256 than it should; one that is gone by now has not."""
    path, expected = box.blobs.path(file.name), file.name
    if file.kind == "result":
        record = box.records.get(file.name)
        if record is None or record.result is None:
            return False  # what it should have is not known
        path = box.results.path(record.id, attempt=record.attempt)
        expected = record.result.sha256
    try:
        return sha256_of(path) != expected
    except FileNotFoundError:
        return False


@contextmanager
def _box(redis_url: str | None, data: Path | None) -> Iterator[tuple[Backing, Cleaner]]:
    """Give the box that a command's options name, and its cleaner."""
    with beside_the_box():
        settings = Settings.read(redis_url=at_redis(redis_url, data), data=data)
        reserve_bytes = noted_reserve_bytes(settings.data)
        if reserve_bytes is not None:
            settings = settings.model_copy(update={"disk_reserve_bytes": reserve_bytes})
        box = Backing.on_redis(settings)
        yield box, Cleaner(settings, box)


def _print_owners(box: Backing, *, json: bool) -> int:
    kinds = {f"{kind}_bytes": by_owner for kind, by_owner in box.taken().items()}
    in_all = sum(kinds.values(), Counter[str]())
    taken = {o: [by_owner[o] for by_owner in kinds.values()] for o, _ in in_all.most_common()}
    left_bytes, free_bytes = box.blobs.room.left_bytes(), box.blobs.room.free_bytes()
    memory = box.records.memory()
    if json:
        report = {
            "owners": [{"owner": o, **dict(zip(kinds, taken[o], strict=True))} for o in taken],
            "free_bytes": free_bytes,
            "reserve_bytes": box.blobs.room.reserved_bytes(),
            "redis_bytes": memory.used_bytes,
            "redis_bound_bytes": memory.bound_bytes,
        }
        print(jsons.dumps(report))
        return DONE
    rows = [(o, *map(in_units, sizes)) for o, sizes in taken.items()]
    say_table(
        [("OWNER", "BLOBS", "RESULTS", "RUNS", "STORES"), *rows]
        if rows
        else [("nothing is stored",)]
    )
    print(f"free on the disk: {in_units(free_bytes)}, of it {in_units(left_bytes)} above reserve")
    bound = "" if memory.bound_bytes is None else f" of {in_units(memory.bound_bytes)}"
    print(f"in Redis: {in_units(memory.used_bytes)}{bound}")
    return DONE


def _print_gone(gone: Sequence[Stored], *, dry_run: bool, json: bool) -> None:
    total_bytes = sum(file.size_bytes for file in gone)
    if json:
        print(jsons.dumps({"removed": [vars(file) for file in gone], "bytes": total_bytes}))
        return
    _print_files(gone)
    verb = "would remove" if dry_run else "removed"
    print(f"{verb} {len(gone)} files of {in_units(total_bytes)}")


def _print_files(files: Sequence[Stored]) -> None:
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used_s))
        size = in_units(file.size_bytes)
        owners = printable(", ".join(file.owners))
        print(f"{file.kind:6} {file.name}  {size:>10}  {used}  {owners}")


def _chosen(
    cleaner: Cleaner, *, before_s: float, owner: str | None, only: str | None
) -> Sequence[Stored]:
    needed = cleaner.needed()
    return [
        file
        for file in sorted(cleaner.stored(), key=lambda file: file.used_s)
        if file.used_s < before_s
        and file.name not in needed
        and (owner is None or owner in file.owners)
        and only in (None, f"{file.kind}s")
    ]
