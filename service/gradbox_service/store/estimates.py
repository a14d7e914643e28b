"""What was measured of jobs: one small file each, by what makes jobs alike.

They are files, and not in Redis, so that admission looks them up without a command of its own, and
so that a box on which nobody estimates pays for one look at a folder that is not there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from gradbox.protocol import EstimateView
from gradbox_service.store.files import make_folder, write_whole

# The oldest go beyond so many, and all after so long: models, boxes and torch change.
MOST_KEPT: Final = 1000
LIFETIME_S: Final = 30 * 24 * 3600.0


class Estimates:
    """The estimates in one folder, shared by every process of the box."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def any(self) -> bool:
        """Return whether there may be one."""
        try:
            with os.scandir(self._folder) as entries:
                return next(entries, None) is not None
        except FileNotFoundError:
            return False

    def find(self, key: str) -> EstimateView | None:
        """Return what was kept under a key, unless it is too old or damaged."""
        path = self._path(key)
        try:
            if time.time() - path.stat().st_mtime > LIFETIME_S:
                return None
            return EstimateView.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    def keep(self, key: str, estimate: EstimateView) -> None:
        """Keep an estimate in the place of an earlier one."""
        make_folder(self._folder)
        write_whole(self._path(key), estimate.model_dump_json().encode())
        written = {path: path.stat().st_mtime for path in self._folder.glob("*.json")}
        oldest_first = sorted(written, key=lambda path: written[path])
        for path in oldest_first[: max(0, len(written) - MOST_KEPT)]:
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
