"""The way to a box: submit computations, find jobs and models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Unpack

import httpx

from gradbox.batch import Batch
from gradbox.computations import Computation
from gradbox.computations.computation import Submission
from gradbox.errors import UnusableModel
from gradbox.html import Iterated, Listed
from gradbox.http.connection import Connection, Retry, parsed
from gradbox.http.paths import blob_path, job_path, model_path
from gradbox.http.posting import Answered
from gradbox.job import QUICK_S, Job, JobWaits
from gradbox.protocol import (
    BlobList,
    BlobView,
    JobList,
    JobState,
    JobView,
    ModelKeywords,
    ModelList,
    ModelView,
)
from gradbox.results.result import GradResult
from gradbox.settings import ClientSettings, find_settings
from gradbox.submitting import Submitter
from gradbox.tensors.tensor_bytes import Tensor

if TYPE_CHECKING:
    from gradbox.remote.model import RemoteModel

RELOAD_POLL_S: Final = 0.2
# The most jobs that a box lists in one answer.
PAGE: Final = 500


class GradClient:
    """A box, as one user sees it. Threads may share one, and so may processes that are forked off.

        with GradClient() as client:  # nothing is sent yet
            result = client.run(Gradient(model="minilm", inputs=shards, loss=info_nce))

    Args:
        url: the box's address. By default GRADBOX_URL, else what `gradbox up` wrote in this folder,
            else what `gradbox login` wrote; see `gradbox.settings`.
        token: the user's token; by default GRADBOX_TOKEN, else the one that stands beside the URL.
        transport: an httpx transport in place of the network: the in-process service's, or a mock.
        timeout_s: seconds that one read or write may stall.
        retry: how long requests are repeated after transient faults, and with which pauses.

    Raises:
        ServiceUnavailable: no address was found, or one that is not http(s)://HOST.
        Unauthorized: no token was found for the address.
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
        self._submitter = Submitter(self._connection)
        self._waits = JobWaits(self._connection)
        self._results = settings.results

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

    def submit(self, computation: Computation, *, progress: bool | None = None) -> Job:
        """Upload the tensors that the box does not have, post the job, and return its handle.

        Args:
            computation: a `Gradient`, `PerSampleGradient`, `Jacobian`, `MixedGradient`, `Forward`.
            progress: whether to show how much is uploaded, where that is much; None shows it on a
                terminal and in a notebook.

        Raises:
            InvalidJob: the computation cannot be run as it is; the subclass says why.
            Unauthorized: the box does not know the token.
            ServiceUnavailable: the box cannot be reached.
        """
        return self._handle(self._submitter.submit(computation, progress=progress))

    def run(self, computation: Computation, *, progress: bool | None = None) -> GradResult:
        """Submit a job, wait for it and return its result.

        Where inputs and result are small and the job ends within a second, that is one request.

        Raises:
            InvalidJob, Unauthorized, ServiceUnavailable: as for `submit`.
            JobFailed, JobCancelled, ResultGone: as for `Job.result`.
        """
        answered = self._submitter.submit(computation, progress=progress, wait_s=QUICK_S)
        return self._handle(answered).result(progress=progress)

    def batch(self) -> Batch:
        """Return a context in which many jobs are submitted at a time; see `Batch`."""
        return Batch(lambda submission, stop: self._send(submission, progress=False, stop=stop))

    def job(self, job_id: str) -> Job:
        """Return a handle on a job of this user's; the box's owner may have anybody's.

        Raises:
            JobNotFound: there is no such job, or it is somebody else's.
        """
        answer = self._connection.request("GET", job_path(job_id))
        return self._handle(Answered(parsed(JobView, answer)))

    def jobs(
        self,
        *,
        state: JobState | str | None = None,
        limit: int | None = None,
        everybodys: bool = False,
    ) -> Iterator[Job]:
        """Iterate over this user's jobs, or those of all users, newest first.

        Jobs are fetched in pages as the iteration goes on, the first page at once. One that is
        submitted meanwhile is not among them, and none comes twice.

        Args:
            state: only jobs in this state.
            limit: at most so many; None is all.
            everybodys: the jobs of all users; for the box's owner.

        Raises:
            OwnerOnly: everybody's jobs were asked for, and the token is not the box's owner's.
        """
        asked = {"state": state, "all": "true" if everybodys else None}

        def fetch(cursor: str | None, num_wanted: int | None) -> JobList:
            page = None if num_wanted is None else min(num_wanted, PAGE)
            query = asked | {"limit": page, "cursor": cursor}
            given = httpx.QueryParams({k: v for k, v in query.items() if v is not None})
            path = f"/v1/jobs?{given}" if given else "/v1/jobs"
            return parsed(JobList, self._connection.request("GET", path))

        def jobs(page: JobList) -> Iterator[Job]:
            left = limit
            while True:
                yield from (self._handle(Answered(view)) for view in page.jobs)
                left = None if left is None else left - len(page.jobs)
                if page.next is None or (left is not None and left <= 0):
                    return
                page = fetch(page.next, left)

        first = fetch(None, limit)
        return Iterated(jobs(first), html=first._repr_html_)

    def blobs(self) -> list[BlobView]:
        """Return what this user has sent to the box and is there still, in no particular order."""
        found: list[BlobView] = []
        query = ""
        while True:
            page = parsed(BlobList, self._connection.request("GET", f"/v1/blobs{query}"))
            found += page.blobs
            if page.next is None:
                return found
            query = f"?{httpx.QueryParams(cursor=page.next)}"

    def delete_blob(self, digest: str) -> None:
        """Delete a blob of this user's; nothing happens if it is gone.

        Whatever names it again sends it again.

        Raises:
            BlobInUse: a job that waits or runs needs it.
            InvalidRequest: that is no digest.
        """
        self._connection.request("DELETE", blob_path(digest))

    def models(self) -> list[ModelView]:
        """Return the registered models with their parameters, entry points and versions.

        A model that the box cannot build is among them: `usable` is false, `reason` says why.
        """
        found = self._models("GET", "/v1/models")
        return Listed(found.models, html=found._repr_html_)

    def reload_models(self, *, timeout_s: float | None = None) -> ModelList:
        """Have the workers read the models file again, and wait until they have; for the owner.

        Each worker tries the models beside its jobs, and offers them once it has tried all. Jobs
        that run end on the models that they began with; jobs that wait for a version that is gone
        fail with `UnknownModel`.

        Args:
            timeout_s: seconds to wait; None waits without end, 0 not at all.

        Returns:
            The models that the workers offer now. `reloading` names the workers that have not read
            the file yet. `errors` says by worker why one could not; it offers what it did before.

        Raises:
            OwnerOnly: the token is not that of the box's owner.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found = self._models("POST", "/v1/models/reload")
        while found.reloading and (deadline is None or time.monotonic() < deadline):
            time.sleep(RELOAD_POLL_S)
            found = self._models("GET", "/v1/models")
        return found

    def model_info(self, name: str) -> ModelView:
        """Describe one registered model; print its `example_code()` for a job to begin with.

        Where the box cannot build it, `usable` is false, and `reason` says why.

        Raises:
            UnknownModel: there is none of that name.
        """
        return parsed(ModelView, self._connection.request("GET", model_path(name)))

    def model(
        self,
        model: str,
        *,
        readout: Callable[..., Any] | None = None,
        wrt: str | Sequence[str] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        progress: bool | None = False,
        **options: Unpack[ModelKeywords],
    ) -> RemoteModel:
        """Return a registered model as a callable whose outputs have a `grad_fn`; needs torch.

            f = client.model("minilm", mode="train", output="last_hidden_state")
            loss = any_python(torch.cat([f(shard) for shard in shards]))  # forward on the box
            loss.backward()  # and backward
            f.grads["encoder.layer.5.output.dense.weight"]

        Args:
            model: NAME, or NAME@VERSION with at least 8 digits of the version.
            readout: as for `Gradient`.
            wrt: as for `Gradient`.
            weights: a partial state dict laid over the registered weights. Its tensors may change
                between calls: each call sees the numbers they have when it is made.
            progress: whether its jobs show progress bars, as for `Job.wait`.
            options: mode, seed, output, precision, retain, transfer, priority, timeout_s, devices
                and name, as for `Gradient`. `mode` is that of the first calls; `train()` and
                `eval()` change it. `retain` is for graphs kept on the box from the calls until
                `backward()`. `transfer` is the format of gradients, and of the parameters in
                `weights` as they are sent.

        Raises:
            UnknownModel: there is none of that name.
            UnusableModel: the box cannot build it.
            ModuleNotFoundError: torch is not installed here.
        """
        from gradbox.remote import RemoteModel, RemoteOptions

        unknown = sorted(options.keys() - ModelKeywords.__annotations__.keys())
        if unknown:
            raise TypeError(f"GradClient.model() got an unexpected keyword argument {unknown[0]!r}")
        view = self.model_info(model)
        if not view.usable:
            raise UnusableModel(f"the model {view.name!r} cannot be used: {view.reason}")
        named = f"{view.name}@{view.version}"
        given = RemoteOptions(model=named, readout=readout, wrt=wrt, **options)
        return RemoteModel(self, view, weights=weights, options=given, progress=progress)

    def _models(self, method: str, path: str) -> ModelList:
        return parsed(ModelList, self._connection.request(method, path))

    def _send(
        self,
        submission: Submission,
        *,
        progress: bool | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Job:
        """Send what was prepared elsewhere; see `Submitter.send`."""
        send = self._submitter.send
        return self._handle(send(submission, progress=progress, stop=stop, wait_s=wait_s))

    def _handle(self, answered: Answered) -> Job:
        results, waits = self._results, self._waits
        view, result = answered.view, answered.result
        return Job(self._connection, view, waits=waits, result=result, results=results)
