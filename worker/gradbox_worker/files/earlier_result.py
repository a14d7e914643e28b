"""The result of an earlier job that a job reads: the outputs of a forward job, with which a replay
is compared, or the rows that other rows are multiplied with.
"""

from __future__ import annotations

from gradbox.protocol import Receipt
from gradbox.results.result_files import HeldTensors, LocalFile
from gradbox.tensors.checksums import is_whole
from gradbox_worker.work import Work


def earlier_result(work: Work) -> LocalFile | HeldTensors | None:
    """Return what the job that `work` goes on from returned.

    Returns:
        None if it is not there any more, or damaged. A file stays readable while it is held, also
        when it is removed meanwhile.
    """
    if work.earlier_tensors is not None:
        return work.earlier_tensors
    path = work.earlier_result
    if path is None or not path.exists() or not is_whole(path):
        return None
    return LocalFile(path)


def receipt_of(result: LocalFile | HeldTensors) -> Receipt:
    """Return what a result says of its own making."""
    return Receipt.model_validate_json(result.metadata["gradbox"])
