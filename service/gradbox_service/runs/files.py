"""The files of runs, DATA/runs/ID: states that workers write, of which some have names.

N.safetensors            the state after step N; the newest two
save-NAME.safetensors    a saved one
start.safetensors        what the run goes on from
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from gradbox.protocol import StateRef
from gradbox_service.store.files import make_folder, use_of


class RunFiles:
    """The folders of all runs of a box."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, state: StateRef) -> Path:
        """Return where a state is, by its run and its step or its save; it need not be there."""
        name = str(state.step) if state.save is None else f"save-{state.save}"
        return self._folder / str(state.run) / f"{name}.safetensors"

    def start(self, run_id: str, state: StateRef) -> None:
        """Keep a state as what a run goes on from.

        Raises:
            FileNotFoundError: no file has it.
        """
        source, folder = self.path(state), self._folder / run_id
        if not source.exists():
            raise FileNotFoundError(source)
        make_folder(folder)
        os.link(source, folder / "start.safetensors")

    def remove_save(self, run_id: str, name: str) -> None:
        """Remove a saved state."""
        self.path(StateRef(run=run_id, save=name)).unlink(missing_ok=True)

    def remove(self, run_id: str) -> None:
        """Remove all files of a run."""
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def sweep(self, known: Collection[str], *, unused_for_s: float) -> None:
        """Remove folders of runs that are gone, and what was left half written.

        Args:
            known: the runs that there are.
            unused_for_s: what was written to since stays.
        """
        before_s = time.time() - unused_for_s
        for folder in self._folder.glob("*"):
            found = use_of(folder)
            if found is not None and found.written_s < before_s and folder.name not in known:
                self.remove(folder.name)
        for path in self._folder.glob("*/*.writing"):
            found = use_of(path)
            if found is not None and found.written_s < before_s:
                path.unlink(missing_ok=True)
