"""Result files on disk: DATA/results/JOB.ATTEMPT.safetensors.

The attempt is part of the name, so an attempt that was thought dead and ends late never replaces
the file that the record speaks of.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gradbox.protocol import ResultView
from gradbox_service.store.files import make_folder, put_in_place


class ResultStore:
    """The results under one folder, shared by every process of the box."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt's result is once it is committed."""
        return self._root / f"{job_id}.{attempt}.safetensors"

    def beside(self, job_id: str, *, attempt: int) -> Path:
        """Return where the attempt writes its result; the folder exists."""
        make_folder(self._root)
        return self._root / f"{job_id}.{attempt}.partial"

    def commit(self, job_id: str, *, attempt: int) -> ResultView:
        """Flush, hash and name what was written beside.

        Raises:
            FileNotFoundError: nothing was written.
        """
        beside = self.beside(job_id, attempt=attempt)
        with beside.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        put_in_place(beside, self.path(job_id, attempt=attempt))
        return ResultView(size_bytes=size_bytes, sha256=digest)

    def discard(self, job_id: str, *, attempt: int) -> None:
        """Remove what the attempt wrote, whether committed or not."""
        self.beside(job_id, attempt=attempt).unlink(missing_ok=True)
        self.path(job_id, attempt=attempt).unlink(missing_ok=True)
