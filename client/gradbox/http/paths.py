"""Where one job, one run, one blob and one model are on a box, by what a user calls them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from gradbox.errors import InvalidRequest, JobNotFound, RunNotFound, UnknownModel
from gradbox.protocol.spec_fields import DIGEST, JOB_ID, StateRef


def blob_path(digest: Any) -> str:
    """Return the path of a blob.

    Raises:
        InvalidRequest: that is no blob's digest.
    """
    if not isinstance(digest, str) or DIGEST.fullmatch(digest) is None:
        raise InvalidRequest(
            f"expected the digest of a blob, 64 digits as `gradbox blobs list` shows it, got "
            f"{digest!r:.120}"
        )
    return f"/v1/blobs/{digest}"


def job_path(job_id: Any) -> str:
    """Return the path of a job.

    Raises:
        JobNotFound: that is no job's id.
    """
    if not isinstance(job_id, str) or JOB_ID.fullmatch(job_id) is None:
        raise JobNotFound(
            f"expected the id of a job, as job.id has it and `gradbox jobs list` shows it, got "
            f"{job_id!r:.120}"
        )
    return f"/v1/jobs/{job_id}"


def run_path(run_id: Any) -> str:
    """Return the path of a run.

    Raises:
        RunNotFound: that is no run's id.
    """
    if not isinstance(run_id, str) or JOB_ID.fullmatch(run_id) is None:
        raise RunNotFound(
            f"expected the id of a run, as run.id has it and `gradbox runs list` shows it, got "
            f"{run_id!r:.120}"
        )
    return f"/v1/runs/{run_id}"


def state_path(state: StateRef) -> str:
    """Return the path below which the weights of a run's state are."""
    if state.run is None:
        return f"/v1/saves/{state.save}/weights"
    query = "".join(
        f"?{name}={value}"
        for name, value in (("step", state.step), ("save", state.save))
        if value is not None
    )
    return f"{run_path(state.run)}/weights{query}"


def model_path(name: Any) -> str:
    """Return the path of a model.

    Raises:
        UnknownModel: that is no model's name.
    """
    if not isinstance(name, str) or not name:
        raise UnknownModel(
            f"expected the name of a model on the box, as `gradbox models list` shows it, got "
            f"{name if isinstance(name, str) else type(name).__name__!r}"
        )
    return f"/v1/models/{quote(name, safe='@')}"
