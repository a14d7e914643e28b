"""Where one job, one run, one blob and one model are on a box, by what a user calls them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from gradbox.errors import GradboxError, InvalidRequest, JobNotFound, RunNotFound, UnknownModel
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
    return _path_by_id("job", job_id, JobNotFound)


def run_path(run_id: Any) -> str:
    """Return the path of a run.

    Raises:
        RunNotFound: that is no run's id.
    """
    return _path_by_id("run", run_id, RunNotFound)


def _path_by_id(noun: str, given: Any, not_found: type[GradboxError]) -> str:
    if not isinstance(given, str) or JOB_ID.fullmatch(given) is None:
        raise not_found(
            f"expected the id of a {noun}, as {noun}.id has it and `gradbox {noun}s list` shows "
            f"it, got {given!r:.120}"
        )
    return f"/v1/{noun}s/{given}"


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
