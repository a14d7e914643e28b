"""States of runs in files, under DATA/runs.

    RUN/STEP.safetensors         the two newest states that were written
    RUN/start.safetensors        what the run goes on from, if anything: a second name of a save
    RUN/save-NAME.safetensors    a second name of a state that the user keeps

A file has the state's tensors, in its metadata the facts beside them and the run that it is of, and
the checksums that results have. It is written beside and renamed, so it is there whole or not at
all, and it is read only if its bytes are those that were written. The older of the two is for a
newer one that a disk has damaged.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradbox.protocol import RunSpec
from gradbox.tensors.checksums import is_whole
from gradbox_engine.optimize import TrainingState
from gradbox_service.store import Room
from gradbox_service.store.files import put_in_place
from gradbox_worker.files.result_file import write_result
from gradbox_worker.runs.run_book import KnownRun

log = logging.getLogger(__name__)

METADATA_KEY: Final = "gradbox_state"
SUFFIX: Final = ".safetensors"
START: Final = f"start{SUFFIX}"
GENERATIONS: Final = 2


@dataclass(frozen=True)
class SavedState:
    """What a file has: a state, and the run that it is of."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    spec: RunSpec
    model_version: str


class StateFiles:
    """The state files of all runs of a box."""

    def __init__(self, folder: Path, *, disk_reserve_bytes: int | None = None) -> None:
        """Touch no file yet.

        Args:
            folder: DATA/runs.
            disk_reserve_bytes: what stays free on the disk, see `gradbox_service.store.Room`.
        """
        self._folder = folder
        self._room = Room(folder, disk_reserve_bytes)

    def steps(self, run_id: str) -> list[int]:
        """Return of which steps there are states, the newest first; saves do not count."""
        names = (path.stem for path in (self._folder / run_id).glob(f"*{SUFFIX}"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def size_bytes(self, run_id: str) -> int:
        """Return what the run's states take on disk."""
        paths = (self._path(run_id, str(step)) for step in self.steps(run_id))
        return sum(path.stat().st_size for path in paths)

    def write(self, run: KnownRun, state: TrainingState) -> None:
        """Write a state, and remove all but the newest two.

        Raises:
            StorageFull: the disk does not hold it.
            InvalidInputs: a dtype has no place in a safetensors file.
            OSError: it cannot be written.
        """
        self._put(self._path(run.id, str(state.num_steps)), run, state)
        for step in self.steps(run.id)[GENERATIONS:]:
            self._path(run.id, str(step)).unlink(missing_ok=True)

    def _put(self, path: Path, run: KnownRun, state: TrainingState) -> None:
        beside = _beside(path)
        tensors = state.tensors()
        document = {
            "facts": state.facts(),
            "names": list(tensors),  # in the state's order, in which gradients are added up
            "spec": run.spec.model_dump(mode="json"),
            "model_version": run.model_version,
        }
        try:
            metadata = {METADATA_KEY: json.dumps(document)}
            write_result(beside, tensors, metadata=metadata, room=self._room)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            put_in_place(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    def read(self, run_id: str, step: int) -> SavedState | None:
        """Return a state on the CPU; None if there is no such file, or a damaged one."""
        return _read(self._path(run_id, str(step)))

    def start(self, run_id: str) -> SavedState | None:
        """Return what a run goes on from."""
        return _read(self._folder / run_id / START)

    def saved(self, run_id: str, name: str) -> SavedState | None:
        """Return a state that was saved under a name."""
        return _read(self._path(run_id, f"save-{name}"))

    def save(self, run: KnownRun, state: TrainingState, name: str) -> int:
        """Keep a state under a name, in place of what has it; return its bytes.

        Raises:
            As `write`.
        """
        path = self._path(run.id, f"save-{name}")
        if state.num_steps in self.steps(run.id):
            beside = _beside(path)
            os.link(self._path(run.id, str(state.num_steps)), beside)
            put_in_place(beside, path)
        else:
            self._put(path, run, state)
        return path.stat().st_size

    def _path(self, run_id: str, name: str) -> Path:
        return self._folder / run_id / f"{name}{SUFFIX}"


def _beside(path: Path) -> Path:
    """Return where a file is written, perhaps by several devices at once."""
    return path.with_name(f"{path.stem}.{secrets.token_hex(4)}.writing")


def _read(path: Path) -> SavedState | None:
    try:
        if not is_whole(path):
            log.warning("the state %s has other bytes than were written", path)
            return None
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {})[METADATA_KEY])
            return SavedState(
                # Copies, for the file may be replaced while they live.
                {name: file.get_tensor(name).clone() for name in document["names"]},
                document["facts"],
                RunSpec.model_validate(document["spec"]),
                document["model_version"],
            )
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, ValidationError) as error:
        log.warning("the state %s cannot be read: %s", path, error)
        return None
