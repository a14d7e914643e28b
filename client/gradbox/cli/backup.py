"""`gradbox backup`: a copy of what a box cannot make anew, also while it runs.

Its records and tokens are in append-only files of Redis, of which a manifest names those that
belong together. Redis writes them anew now and then, and removes those that it no longer names: so
where one has gone meanwhile, all are copied again. A file that grows while it is copied is at worst
cut short in its last change, which Redis ignores.

The states of runs are files that never change once they have their names: on the same disk the copy
has them by a second name, and takes no room.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from gradbox.cli.down import DataFolder, data_folder
from gradbox.cli.output import say

RECORDS: Final = Path("redis", "appendonlydir")
MANIFEST: Final = "appendonly.aof.manifest"
MODELS_FILE: Final = "models.toml"
RUNS: Final = "runs"
TOKEN: Final = "owner-token"
# What a line of the manifest ends with whose file Redis is about to remove.
HISTORY: Final = "h"

Destination = Annotated[
    Path, typer.Argument(metavar="DEST", help="the copy; an earlier one there is replaced")
]
ModelsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="its models file [DATA/models.toml]")
]


def run(dest: Destination, *, data: DataFolder = None, models: ModelsFile = None) -> int:
    """Copy beside the earlier copy, and put it in its place once it is whole."""
    folder, dest = data_folder(data), dest.absolute()
    if not (folder / RECORDS / MANIFEST).is_file():
        raise typer.BadParameter(f"expected the data folder of a box with --data, got {folder}")
    if models is not None and not models.is_file():
        raise typer.BadParameter(f"expected a models file at {models}, found none")
    if dest.exists() and not (dest / RECORDS / MANIFEST).is_file():
        raise typer.BadParameter(f"expected an earlier backup or nothing at {dest}, got files")
    new = dest.with_name(f".{dest.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700, parents=True)
    models = models or folder / MODELS_FILE
    for path in (folder / TOKEN, models):
        if path.is_file():
            shutil.copy2(path, new / (MODELS_FILE if path == models else path.name))
    _copy_records(folder / RECORDS, new / RECORDS)
    _copy_states(folder / RUNS, new / RUNS)
    if os.geteuid() == 0:  # the copy is to belong to whom the data belongs
        owner = folder.stat()
        for path in (new, *new.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
    if dest.exists():
        shutil.rmtree(dest)
    new.rename(dest)
    say(f"copied {folder} to {dest}")
    if not models.is_file():
        say(f"no models file is in it, for none is at {models}: name it by --models")
    return 0


def _copy_states(runs: Path, to: Path) -> None:
    """Copy what is there; a file may go, or get its name, meanwhile."""
    for path in runs.glob("*/*.safetensors"):
        copy = to / path.parent.name / path.name
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            try:
                os.link(path, copy)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                shutil.copy2(path, copy)


def _copy_records(records: Path, to: Path) -> None:
    to.mkdir(mode=0o700, parents=True)
    while True:
        manifest = (records / MANIFEST).read_bytes()
        (to / MANIFEST).write_bytes(manifest)
        try:
            for line in manifest.decode().splitlines():
                _, name, *_, kind = line.split()
                if kind != HISTORY:
                    shutil.copy2(records / name, to)
        except FileNotFoundError as error:
            if (records / MANIFEST).read_bytes() == manifest:  # nothing was written anew
                raise typer.BadParameter(
                    f"{records} is not whole: its manifest names {error.filename}, which is gone"
                ) from None
            continue
        return
