"""Runs: training on the box, one job a step. Records, never tensors: states lie in files.

To read in this order:

    record     what is known of a run and of a saved state, and how a step changes it
    records    where that is kept; what is written together with a job's record
    steps      which job a posted step is: exactly one of a number is made
    states     which state somebody means, and whether it is theirs
    files      the folders of the states
    removal    what removes runs and saves
"""

from gradbox_service.runs.files import RunFiles
from gradbox_service.runs.record import RunRecord, SaveRecord
from gradbox_service.runs.records import Runs

__all__ = ["RunFiles", "RunRecord", "Runs", "SaveRecord"]
