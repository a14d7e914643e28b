"""The way to a box: submit computations, find jobs and models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from gradbox.batch import Batch
from gradbox.computations import Computation
from gradbox.computations.computation import Submission
from gradbox.errors import MissingBlobs, UnusableModel
from gradbox.html import Iterated, Listed
from gradbox.http.paths import blob_path, job_path, model_path
from gradbox.http.posting import Answered
from gradbox.job import QUICK_S, Job
from gradbox.local import LocalConnection, LocalSubmitter, open_box
from gradbox.protocol import (
    BlobList,
    BlobView,
    JobList,
    JobState,
    JobView,
    ModelKeywords,
    ModelList,
    ModelView,
    parse_posted,
)
from gradbox.results.result import GradResult
from gradbox.runs.of_client import RunsClient
from gradbox.stores.of_client import StoresClient
from gradbox.tensors.tensor_bytes import Tensor

if TYPE_CHECKING:
    from torch import nn

    from gradbox.estimate import Estimate
    from gradbox.remote.model import RemoteModel

RELOAD_POLL_S: Final = 0.2


class GradClient(RunsClient, StoresClient):
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

    @classmethod
    def local(
        cls, models: Mapping[str, nn.Module] | str | Path, *, device: str = "auto"
    ) -> GradClient:
        """Return a client without a box: it computes in this process, with the same code.

            client = GradClient.local({"mine": model})  # a live module, wherever it is
            result = client.run(Gradient(model="mine", inputs=shards, loss=info_nce))

        Losses are traced and interpreted as on a box, and gradients have the bits of a box's on the
        same device. A module is used as it is at each call, and is as it was afterwards. A job is
        over when it was submitted; the `__cause__` of an error is what the model or loss raised.

        Args:
            models: live modules by name; or the path of a models file, whose models are built when
                they are first used.
            device: where the models of a file go: "auto", "cpu", "cuda:1".

        Raises:
            ModuleNotFoundError: the worker's packages are not installed.
            InvalidJob: the models are none, or the file cannot be read.
        """
        box = open_box(models, device=device)
        client = cls.__new__(cls)
        connection = LocalConnection(box)
        client._use(connection, LocalSubmitter(connection, box))
        return client

    def submit(self, computation: Computation, *, progress: bool | None = None) -> Job:
        """Upload the tensors that the box does not have, post the job, and return its handle.

        Args:
            computation: a `Gradient`, say, see `gradbox.computations`.
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

    def again(self, job_id: str, **changes: Any) -> Job:
        """Submit a job once more, from what the box has of it, and return the new one's handle.

            job = client.again(result.manifest.job, seed=1)

        Nothing is sent: its tensors and graphs are on the box. The model's version is as it was.

        Args:
            changes: options in place of the job's own, such as seed, mode, wrt or precision.

        Raises:
            JobNotFound: there is no such job of this user's.
            MissingBlobs: tensors of it have left the box.
            InvalidJob: the job cannot be run so; a step and a query belong to their run and store.
        """
        found = self._connection.request("GET", f"{job_path(job_id)}/spec")
        spec = parse_posted({**found.json(), **changes})
        try:
            return self._send(Submission(spec, blobs=(), large=()))
        except MissingBlobs as error:
            raise MissingBlobs(
                f"expected the tensors of job {job_id} on the box, but {len(error.missing)} of its "
                f"blobs have been removed, {error.missing[0]} for one: submit it by the program "
                f"that made it, which sends them again",
                missing=error.missing,
            ) from None

    def estimate(self, computation: Computation, *, progress: bool | None = None) -> Estimate:
        """Say what a job would take: whether it fits, memory, seconds, bytes, and the wait.

            print(client.estimate(Gradient(model="minilm", inputs=shards, loss=info_nce)))

        A short job measures it: it runs the largest shard of each group forward and backward, the
        loss at its full size, and counts the rest. It uploads what `submit` would, so that the job
        itself then uploads nothing. The box keeps what it learns of a model and shapes for a month:
        the receipt of a job like this one has the estimate beside the truth, and a job that cannot
        fit is refused when it is submitted.

        Of a training step it is `run.estimate(...)`.

        Args:
            computation: as for `submit`, with its loss; no `Gradient` at `Cotangents`.
            progress: as for `submit` and `Job.wait`.

        Raises:
            InvalidJob, Unauthorized, ServiceUnavailable: as for `submit`.
            JobFailed: the computation fails on these shards, as the job would.
        """
        from gradbox.estimate import ask

        return ask(
            computation,
            connection=self._connection,
            submitter=self._submitter,
            handle=self._handle,
            progress=progress,
        )

    def batch(self) -> Batch:
        """Return a context in which many jobs are submitted at a time; see `Batch`."""
        return Batch(lambda submission, stop: self._send(submission, progress=False, stop=stop))

    def job(self, job_id: str) -> Job:
        """Return a handle on a job of this user's; the box's owner may have anybody's.

        Raises:
            JobNotFound: there is no such job, or it is somebody else's.
        """
        return self._handle(Answered(self._connection.ask(JobView, "GET", job_path(job_id))))

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
        first, views = self._listed("/v1/jobs", JobList, lambda page: page.jobs, asked, limit)
        jobs = (self._handle(Answered(view)) for view in views)
        return Iterated(jobs, html=first._repr_html_)

    def blobs(self) -> list[BlobView]:
        """Return what this user has sent to the box and is there still, in no particular order."""
        _, views = self._listed("/v1/blobs", BlobList, lambda page: page.blobs, {}, None)
        return list(views)

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
        return self._connection.ask(ModelView, "GET", model_path(name))

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
            options: mode, seed, output, precision, recompute, retain, transfer, priority,
                timeout_s, devices and name, as for `Gradient`. `mode` is that of the first calls;
                `train()` and `eval()` change it. `retain` is for graphs kept on the box from the
                calls until `backward()`. `transfer` is the format of gradients, and of the
                parameters in `weights` as they are sent.

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
        # A live module's numbers may change, so that it has no version.
        named = f"{view.name}@{view.version}" if view.version else view.name
        given = RemoteOptions(model=named, readout=readout, wrt=wrt, **options)
        return RemoteModel(self, view, weights=weights, options=given, progress=progress)

    def _models(self, method: str, path: str) -> ModelList:
        return self._connection.ask(ModelList, method, path)
