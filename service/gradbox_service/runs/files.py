"""The files of runs, DATA/runs/ID: states that workers write, of which some have names.

N.safetensors            the state after step N; the newest two
save-NAME.safetensors    a saved one
start.safetensors        what the run goes on from
"""

from __future__ import annotations

import os
from pathlib import Path

from gradbox.protocol import StateRef
from gradbox_service.runs.record import RunRecord
from gradbox_service.store.files import make_folder
from gradbox_service.store.folders import OwnedFolders


class RunFiles(OwnedFolders[RunRecord]):
    """The folders of all runs of a box."""

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

    def _is_left_behind(self, path: Path, record: RunRecord) -> bool:
        return path.suffix == ".writing"
