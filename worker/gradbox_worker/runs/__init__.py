"""Runs on a device: their states in memory and in files, and how a lost one is made again.

State n of a run is a function of the run's spec and of its steps 1 … n. So there is one recovery:
the newest state file at or before n is read, and the steps since are made again from their specs,
which the service keeps until state files cover them. Whenever it is doubtful what a state in memory
is, it is forgotten.

Read `run_book` first, what is known of a run, which `recorded` reads from Redis; then `resident`,
the states in memory, `state_file`, those on disk, and `adapters`, the structure that a run with an
adapter has of its own. A step is made by `computations.step`.
"""

from gradbox_worker.runs.recorded import RecordedRuns
from gradbox_worker.runs.resident import HeldRun, RunStates
from gradbox_worker.runs.run_book import KeptStep, KnownRun, RunBook
from gradbox_worker.runs.state_file import StateFiles

__all__ = [
    "HeldRun",
    "KeptStep",
    "KnownRun",
    "RecordedRuns",
    "RunBook",
    "RunStates",
    "StateFiles",
]
