"""The same client without a box: jobs are computed in this process, as a worker's device does it.

    GradClient ── submitting ──→ LocalSubmitter ──→ gradbox_worker.local: admits, computes, answers
               └─ all else ────→ LocalConnection ─→ describes models; refuses what needs a box

A job is over when it was submitted, and its result lies in memory. No service, Redis, token, socket
or file has a part in it. The worker's package is imported by its name when a local client is made:
a laptop that only uses a box has no need of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol
from urllib.parse import unquote

import httpx

from gradbox.computations.computation import Submission
from gradbox.errors import NeedsBox, ServiceUnavailable
from gradbox.http.connection import CLOSED, Connection
from gradbox.http.download import why_no_result
from gradbox.http.posting import Answered
from gradbox.inputs.uploads import KnownTensors
from gradbox.progress import ProgressBar
from gradbox.protocol import JobView, ModelList, ModelView
from gradbox.results.result_files import HeldTensors
from gradbox.submitting import Submitter

if TYPE_CHECKING:
    from torch import nn

URL: Final = "this process"
WORKER: Final = "gradbox_worker.local"
MODELS: Final = "/v1/models"
# What only a box does, by how the path begins, and what to do without one.
ONLY_ON_A_BOX: Final[Mapping[str, str]] = {
    "/v1/models/reload": "a box's workers read their models file again; here, make another client",
    "/v1/jobs": "a box keeps jobs, to be listed, found by id, followed and deleted; here, a job is "
    "over once it was submitted, and its handle has the result",
    "/v1/runs": "a box keeps runs, whose weights outlive the process; here, add gradients to a "
    "module (result.apply_to, or f.apply_to of client.model) and let torch's optimizer step",
    "/v1/stores": "a box keeps rows for a whole lab; here, keep the results yourself",
    "/v1/box": "jobs wait for a device; here, each begins as it is submitted",
    "/v1/blobs": "a box keeps uploaded tensors; here, jobs read them where they lie",
}


@dataclass(frozen=True)
class Ended(Answered):
    """A job that was computed here.

    Attributes:
        tensors: its result; None if it failed.
        cause: what was raised then.
    """

    tensors: HeldTensors | None = None
    cause: BaseException | None = None

    def result(self) -> HeldTensors:
        """Return the result.

        Raises:
            JobFailed: there is none; what the model or the loss raised is its cause.
        """
        if self.tensors is None:
            raise why_no_result(self.view, url=URL) from self.cause
        return self.tensors


class InProcessBox(Protocol):
    """What computes in this process: `gradbox_worker.local.LocalBox`."""

    def models(self) -> list[ModelView]:
        """Describe the models."""

    def model(self, name: str) -> ModelView:
        """Describe one of them."""

    def run(self, submission: Submission, *, on_view: Callable[[JobView], None]) -> Ended:
        """Compute a job to its end.

        Args:
            on_view: called now and then with how far it is.
        """


def open_box(models: Mapping[str, nn.Module] | str | Path, *, device: str) -> InProcessBox:
    """Return what computes on these models in this process.

    Raises:
        ModuleNotFoundError: the worker's packages are not installed.
    """
    try:
        room: Any = import_module(WORKER)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"GradClient.local: expected what a worker computes with on this machine, but "
            f"{error.name} is not installed: pip install 'gradbox[worker]'",
            name=error.name,
        ) from error
    box: InProcessBox = room.LocalBox(models, device=device)
    return box


class LocalConnection(Connection):
    """Stands where a connection to a box does, and opens none."""

    def __init__(self, box: InProcessBox) -> None:
        self.url = URL
        self.closed = False
        self._box = box

    def close(self) -> None:
        """Take no more jobs."""
        self.closed = True

    def request(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Answer what can be known here.

        Raises:
            NeedsBox: that is nothing but models.
        """
        if method != "GET" or not path.startswith(MODELS):
            _refuse(method, path)
        name = unquote(path.removeprefix(MODELS).removeprefix("/"))
        found = self._box.model(name) if name else ModelList(models=self._box.models())
        return httpx.Response(200, content=found.model_dump_json())

    def stream(self, method: str, path: str, **given: Any) -> NoReturn:
        """Refuse: see `request`."""
        _refuse(method, path)

    def backoff(self) -> NoReturn:
        """Refuse: a job's events are followed on a box."""
        _refuse("GET", "/v1/jobs")


class LocalSubmitter(Submitter):
    """Has computations done here."""

    def __init__(self, connection: LocalConnection, box: InProcessBox) -> None:
        self._connection, self._box = connection, box
        self._known = KnownTensors()  # none: every job brings all its tensors

    def send(
        self,
        submission: Submission,
        *,
        progress: bool | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Ended:
        """Compute a job to its end.

        Args:
            stop: once it is set, no job is begun.

        Raises:
            concurrent.futures.CancelledError: `stop` was set.
            InvalidJob: the computation cannot be run as it is; the subclass says why.
        """
        if stop is not None and stop.is_set():
            raise CancelledError
        if self._connection.closed:
            raise ServiceUnavailable(CLOSED)
        with ProgressBar(submission.spec.name or "job", shown=progress) as bar:
            return self._box.run(submission, on_view=bar.show_view)


def _refuse(method: str, path: str) -> NoReturn:
    known = (text for begin, text in ONLY_ON_A_BOX.items() if path.startswith(begin))
    what = next(known, f"a box answers {method} {path}")
    raise NeedsBox(
        f"expected a client of a box, GradClient(), got GradClient.local(...), which computes in "
        f"this process and keeps nothing: {what}"
    )
