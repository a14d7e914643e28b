"""Result files on disk: DATA/results/JOB.ATTEMPT.safetensors.

The attempt is part of the name, so an attempt that was thought dead and ends late never replaces
the file that the record speaks of.
"""

from __future__ import annotations

from pathlib import Path

from gradbox_service.store.room import Room


class ResultStore:
    """The results under one folder, shared by every process of the box."""

    def __init__(self, root: Path, *, reserve_bytes: int | None = None) -> None:
        self._root = root
        self.room = Room(root, reserve_bytes)

    def path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt's result is once it is committed."""
        return self._root / f"{job_id}.{attempt}.safetensors"

    def beside(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt writes its result before it renames it to `path`."""
        return self.path(job_id, attempt=attempt).with_suffix(".partial")

    def discard(self, job_id: str, *, attempt: int) -> None:
        """Remove what the attempt wrote, whether committed or not."""
        self.beside(job_id, attempt=attempt).unlink(missing_ok=True)
        self.path(job_id, attempt=attempt).unlink(missing_ok=True)
