"""A long job's state, DATA/checkpoints/JOB.safetensors, from which another attempt goes on.

The file holds tensors and, in its metadata, the caller's own JSON, the job's identity, and how
often the job was resumed. It is written beside and renamed, so it is there whole or not at all, in
the folder that all workers of the box share.

When one is written: once an attempt has run for a minute, at most every 30 s, and only as long as
all writing so far, and one more like the last, takes at most 3 % of the attempt's time. A disk that
is full costs the checkpoint, not the job.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradbox.errors import StorageFull
from gradbox_service.store import Room
from gradbox_service.store.files import put_in_place
from gradbox_worker.files.result_file import write_result

log = logging.getLogger(__name__)

METADATA_KEY: Final = "gradbox_checkpoint"


@dataclass(frozen=True)
class Pace:
    """How often checkpoints are written."""

    first_s: float = 60.0  # after the attempt began
    every_s: float = 30.0
    share: float = 0.03  # of the attempt's time

    @classmethod
    def after(cls, first_s: float) -> Pace:
        """Return a pace that begins so long after the attempt began, and goes on twice as often."""
        return cls(first_s=first_s, every_s=first_s / 2)


class CheckpointFile:
    """The checkpoint of one job, for one attempt at it.

    Attributes:
        resumed: how often the job went on from a checkpoint, this attempt included.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        attempt: int,
        identity: Mapping[str, str],
        disk_reserve_bytes: int | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the attempt's time; touch no file.

        Args:
            folder: DATA/checkpoints.
            identity: what must be equal for a state to be used: the spec's digest, the model's
                version, the device, the versions of torch and gradbox.
            disk_reserve_bytes: what stays free on the disk, see `gradbox_service.store.Room`.
            clock: returns seconds.
        """
        self.resumed = 0
        self._path = checkpoint_path(folder, job_id)
        # An attempt that is thought dead may still write: never into another one's file.
        self._own = folder / f"{job_id}.{attempt}.safetensors"
        self._room = Room(folder, disk_reserve_bytes)
        self._identity = dict(identity)
        self._pace = pace or Pace()
        self._clock = clock
        self._began = self._written_at = clock()
        self._last_s = self._total_s = 0.0
        self._num_written = 0

    def due(self) -> bool:
        """Tell whether it is time to write the state."""
        now = self._clock()
        ran_s, since_s = now - self._began, now - self._written_at
        wait_s = self._pace.every_s if self._num_written else self._pace.first_s
        return since_s >= wait_s and self._total_s + self._last_s <= self._pace.share * ran_s

    def write(self, state: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write the state in place of the one before; a full disk is logged and passed over.

        Args:
            state: any names, any layout; copied tensor by tensor.
            meta: JSON values.
        """
        document = {"identity": self._identity, "resumed": self.resumed, "meta": dict(meta)}
        began = self._clock()
        try:
            metadata = {METADATA_KEY: json.dumps(document)}
            write_result(self._own, state, metadata=metadata, room=self._room)
            put_in_place(self._own, self._path)
        except StorageFull as error:
            log.warning("no checkpoint of %s: %s", self._path.stem, error)
        self._written_at = self._clock()
        self._last_s = self._written_at - began
        self._total_s += self._last_s
        self._num_written += 1

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the state that an earlier attempt left, and its JSON, on the CPU.

        Returns:
            None if there is none, or none that this attempt may go on from: another model version,
            another device, a file that is not whole.
        """
        try:
            with safe_open(self._path, framework="pt") as file:
                document = json.loads((file.metadata() or {})[METADATA_KEY])
                if document["identity"] != self._identity:
                    log.info("the checkpoint of %s is of another kind of run", self._path.stem)
                    return None
                # Copies: the file is replaced while the tensors live.
                state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                meta = dict(document["meta"])
                self.resumed = int(document["resumed"]) + 1
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            log.warning("the checkpoint of %s cannot be read: %s", self._path.stem, error)
            return None
        return state, meta

    def remove(self) -> None:
        """Remove the job's checkpoint: the job has ended."""
        self._path.unlink(missing_ok=True)


def checkpoint_path(folder: Path, job_id: str) -> Path:
    """Return where a job's checkpoint lies."""
    return folder / f"{job_id}.safetensors"
