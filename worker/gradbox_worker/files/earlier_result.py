"""The result of an earlier job that a job reads: its outputs, or its rows."""

from __future__ import annotations

from gradbox.results.result_files import HeldTensors, LocalFile
from gradbox.tensors.checksums import is_whole
from gradbox_worker.work import Work


def earlier_result(work: Work) -> LocalFile | HeldTensors | None:
    """Return what the job that `work` goes on from returned.

    Returns:
        None if it is not there any more, or damaged.
    """
    if work.earlier_tensors is not None:
        return work.earlier_tensors
    path = work.earlier_result
    if path is None or not path.exists() or not is_whole(path):
        return None
    return LocalFile(path)
