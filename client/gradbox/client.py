"""The way to a box: submit computations, find jobs and models."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from gradbox.computations import Computation
from gradbox.errors import MissingBlobs
from gradbox.http.connection import Connection, Retry, parsed
from gradbox.job import Job
from gradbox.protocol import JobState, JobView, ModelView
from gradbox.settings import ClientSettings, find_settings
from gradbox.tensors.blob import Blob
from gradbox.tensors.tensor_bytes import Tensor

if TYPE_CHECKING:
    from gradbox.remote.model import RemoteModel

# Enough to hide the way to the box and back; more would share the same uplink.
UPLOADS_AT_ONCE: Final = 4
# The most jobs that a box lists in one answer.
PAGE: Final = 500


class _Jobs(BaseModel):
    jobs: list[JobView]
    next: str | None = None


class _Models(BaseModel):
    models: list[ModelView]


class GradClient:
    """A box, as one user sees it. Nothing is sent before the first call.

    Args:
        url: the box's address; see `gradbox.settings` for where it is looked for otherwise.
        token: the user's token, likewise.
        transport: an httpx transport in place of the network: the in-process service's, or a mock.
        timeout_s: how long one read or write may stall.
        retry: how long requests are repeated after transient faults, and with which pauses.

    Raises:
        ServiceUnavailable, Unauthorized: no address or no token was found.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
        retry: Retry | None = None,
    ) -> None:
        settings = find_settings(url, token)
        self.url = settings.url
        self._connection = Connection(
            ClientSettings(url=settings.url, token=settings.token),
            transport=transport,
            timeout_s=timeout_s,
            retry=retry,
        )
        # What this client has seen on the box: not asked for again when it submits in a loop.
        self._present: set[str] = set()

    def __repr__(self) -> str:
        return f"GradClient({self.url!r})"

    def __enter__(self) -> GradClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; jobs continue on the box."""
        self._connection.close()

    def submit(self, computation: Computation) -> Job:
        """Upload what the box does not have and post the job.

        Raises:
            InvalidJob: the computation cannot be run as it is: see its subclasses.
            Unauthorized: the box does not know the token.
            ServiceUnavailable: the box cannot be reached.
        """
        prepared = computation.prepare()
        body = prepared.spec.model_dump_json().encode()
        key = str(uuid.uuid4())
        self._upload(prepared.blobs)
        try:
            view = self._post(body, key)
        except MissingBlobs:
            # The box's owner removed blobs since this client saw them there.
            self._present.clear()
            self._upload(prepared.blobs)
            view = self._post(body, key)
        return Job(self._connection, view)

    def job(self, job_id: str) -> Job:
        """Return a handle on one of one's own jobs.

        Raises:
            JobNotFound: there is none of that id.
        """
        answer = self._connection.request("GET", f"/v1/jobs/{quote(job_id, safe='')}")
        return Job(self._connection, parsed(JobView, answer))

    def jobs(
        self,
        *,
        state: JobState | str | None = None,
        limit: int | None = None,
        everybodys: bool = False,
    ) -> Iterator[Job]:
        """Iterate over one's own jobs, or those of all users, newest first.

        Jobs are fetched in pages as the iteration goes on, the first page at once. One that is
        submitted meanwhile is not among them, and none comes twice.

        Args:
            state: only jobs that are in it.
            limit: at most so many; all if None.

        Raises:
            OwnerOnly: everybody's jobs were asked for, and the token is not the box's owner's.
        """
        asked = {"state": state, "all": "true" if everybodys else None}

        def fetch(cursor: str | None, num_wanted: int | None) -> _Jobs:
            page = None if num_wanted is None else min(num_wanted, PAGE)
            query = asked | {"limit": page, "cursor": cursor}
            given = httpx.QueryParams({k: v for k, v in query.items() if v is not None})
            path = f"/v1/jobs?{given}" if given else "/v1/jobs"
            return parsed(_Jobs, self._connection.request("GET", path))

        def jobs(page: _Jobs) -> Iterator[Job]:
            left = limit
            while True:
                yield from (Job(self._connection, view) for view in page.jobs)
                left = None if left is None else left - len(page.jobs)
                if page.next is None or (left is not None and left <= 0):
                    return
                page = fetch(page.next, left)

        return jobs(fetch(None, limit))

    def models(self) -> list[ModelView]:
        """Return the registered models with their parameters, entry points and versions."""
        answer = self._connection.request("GET", "/v1/models")
        return parsed(_Models, answer).models

    def model_info(self, name: str) -> ModelView:
        """Describe one registered model.

        Raises:
            UnknownModel: there is none of that name.
        """
        answer = self._connection.request("GET", f"/v1/models/{quote(name, safe='@')}")
        return parsed(ModelView, answer)

    def model(
        self,
        model: str,
        /,
        *,
        mode: Literal["eval", "train"] = "eval",
        seed: int = 0,
        output: str | int | None = None,
        readout: Callable[..., Any] | None = None,
        wrt: str | Sequence[str] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32",
        retain: int | Literal["auto"] = "auto",
        priority: int = 0,
        timeout_s: float = 3600.0,
        name: str = "",
        progress: bool | None = False,
    ) -> RemoteModel:
        """Return a registered model as a callable whose outputs have a `grad_fn`; needs torch.

        Args:
            mode: of the first calls; `train()` and `eval()` change it.
            weights: a partial state dict laid over the registered weights. Its tensors may change
                between calls: each call sees the numbers they have when it is made.
            retain: memory in bytes on the box for graphs kept from the calls until `backward()`, so
                that fewer calls are replayed; 0 keeps none, "auto" takes what is free there.
            progress: whether its jobs show progress bars, as for `Job.wait`.

        All else is as computations take it.

        Raises:
            UnknownModel: there is none of that name.
        """
        from gradbox.remote.model import JobOptions, RemoteModel

        options = JobOptions(
            seed=seed,
            output=output,
            readout=readout,
            wrt=wrt,
            precision=precision,
            retain=retain,
            priority=priority,
            timeout_s=timeout_s,
            name=name,
        )
        return RemoteModel(
            self,
            self.model_info(model),
            mode=mode,
            weights=weights,
            options=options,
            progress=progress,
        )

    def _post(self, body: bytes, key: str) -> JobView:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        answer = self._connection.request("POST", "/v1/jobs", body=lambda: [body], headers=headers)
        return parsed(JobView, answer)

    def _upload(self, blobs: Iterable[Blob]) -> None:
        missing = [blob for blob in blobs if blob.digest not in self._present]
        if not missing:
            return
        stop = threading.Event()
        pool = ThreadPoolExecutor(UPLOADS_AT_ONCE)
        try:
            self._present.update(pool.map(partial(self._upload_one, stop=stop), missing))
        finally:
            # After an error or Ctrl-C the other uploads stop too.
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _upload_one(self, blob: Blob, *, stop: threading.Event) -> str:
        """Upload a blob unless the box has it; return its digest. Stops once `stop` is set."""

        def chunks() -> Iterator[memoryview]:
            for chunk in blob.chunks():
                if stop.is_set():
                    raise CancelledError
                yield chunk

        path = f"/v1/blobs/{blob.digest}"
        if self._connection.request("HEAD", path, accept=(404,)).status_code == 404:
            headers = {
                "Content-Length": str(blob.size_bytes),
                "Content-Type": "application/octet-stream",
            }
            self._connection.request("PUT", path, body=chunks, headers=headers)
        return blob.digest
