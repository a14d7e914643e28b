"""The way to a box: submit computations, find jobs and models."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import httpx

from gradbox.batch import Batch
from gradbox.computations import Computation
from gradbox.computations.computation import Submission, checked
from gradbox.errors import RunNotFound, StoreNotFound, UnusableModel
from gradbox.html import Iterated, Listed
from gradbox.http.connection import Connection, Retry, parsed
from gradbox.http.paths import blob_path, job_path, model_path, run_path
from gradbox.http.posting import Answered
from gradbox.job import QUICK_S, Job, JobWaits
from gradbox.local import Ended, LocalConnection, LocalSubmitter, open_box
from gradbox.protocol import (
    BlobList,
    BlobView,
    JobList,
    JobState,
    JobView,
    ModelKeywords,
    ModelList,
    ModelView,
    RunList,
    RunView,
    StateRef,
    StoreList,
    StoreView,
)
from gradbox.protocol.spec_fields import JOB_ID
from gradbox.results.result import GradResult
from gradbox.settings import ClientSettings, find_settings
from gradbox.submitting import Submitter
from gradbox.tensors.tensor_bytes import Tensor

if TYPE_CHECKING:
    from torch import nn

    from gradbox.computations.computation import OfARun
    from gradbox.estimate import Estimate
    from gradbox.protocol.options import Mode, Precision
    from gradbox.protocol.stores import RowDtype
    from gradbox.remote.model import RemoteModel
    from gradbox.runs import LoRA, Optimizer, RunClient, RunState, TrainRun
    from gradbox.stores import GradStore
    from gradbox.stores.projections import Projection

RELOAD_POLL_S: Final = 0.2
# The most jobs, or runs, that a box lists in one answer.
PAGE: Final = 500
Page = TypeVar("Page", JobList, RunList)
Listing = TypeVar("Listing")


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
        connection = Connection(
            ClientSettings(url=settings.url, token=settings.token),
            transport=transport,
            timeout_s=timeout_s,
            retry=retry,
        )
        self._use(connection, Submitter(connection), results=settings.results)

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

    def _use(
        self, connection: Connection, submitter: Submitter, *, results: Path | None = None
    ) -> None:
        """Send by these.

        Args:
            results: the box's own folder of results, if it is this machine's.
        """
        self.url = connection.url
        self._connection, self._submitter, self._results = connection, submitter, results
        self._waits = JobWaits(connection)

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
        first, views = self._listed("/v1/jobs", JobList, lambda page: page.jobs, asked, limit)
        jobs = (self._handle(Answered(view)) for view in views)
        return Iterated(jobs, html=first._repr_html_)

    def train(
        self,
        model: str,
        *,
        optimizer: Optimizer,
        wrt: str | Sequence[str] | None = None,
        adapter: LoRA | None = None,
        mode: Mode = "train",
        precision: Precision = "fp32",
        seed: int = 0,
        name: str = "",
        start: OfARun | str | None = None,
        start_weights: OfARun | str | None = None,
    ) -> TrainRun:
        """Begin a run: training on the box, where weights and optimizer then live.

            run = client.train("minilm", optimizer=Optimizer("adamw", lr=2e-5), wrt="encoder.*")
            step = run.step(inputs=shards, loss=info_nce, loss_inputs={"labels": labels})

        Args:
            model: NAME, or NAME@VERSION with at least 8 digits of the version.
            optimizer: such as `Optimizer("adamw", lr=2e-5)`.
            wrt: globs over the names of the parameters that are trained; by default every
                floating-point parameter.
            adapter: trained in place of the model's own parameters: `LoRA(...)`.
            mode: of all steps, as for `Gradient`.
            precision: of all steps, as for `Gradient`.
            seed: step n draws from `step_seed(seed, n)`.
            name: what listings show, and `find_run` finds.
            start: a run, a state of one or the name of a saved one, of which weights, buffers, the
                optimizer's state and the number of steps go on.
            start_weights: the same, of which weights and buffers go on under a new optimizer.

        Raises:
            InvalidJob: an argument is none that a run can have, or the state that it is to start
                from lacks something, which the message names.
            UnknownModel: there is none of that name.
            RunNotFound: there is no such state to start from.
        """
        from gradbox.runs.begin import run_spec

        given: dict[str, Any] = {"wrt": wrt, "mode": mode, "precision": precision}
        spec = run_spec(
            model, optimizer, adapter, start, start_weights, seed=seed, name=name, **given
        )
        body = spec.model_dump_json().encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid.uuid4())}
        send = self._connection.request
        answer = send("POST", "/v1/runs", body=lambda: [body], headers=headers)
        return self._run_handle(parsed(RunView, answer))

    def find_run(self, run: str) -> TrainRun:
        """Return a run by its id, or the newest of this user's by its name; it goes on from there.

        Raises:
            RunNotFound: there is no such run, or it is somebody else's.
        """
        if isinstance(run, str) and JOB_ID.fullmatch(run):
            try:
                answer = self._connection.request("GET", run_path(run))
                return self._run_handle(parsed(RunView, answer))
            except RunNotFound:
                pass  # it may be a name
        named = self.runs(name=run, limit=1) if isinstance(run, str) and run else iter(())
        for found in named:
            return found
        raise RunNotFound(
            f"expected the id or the name of a run, as `gradbox runs list` shows them, got "
            f"{run!r:.120}: no run of yours has it"
        )

    def saved(self, name: str, *, run: str | None = None) -> RunState:
        """Return a state that was saved under a name: this user's, or one that another one shares.

            model.load_state_dict(client.saved("towers-good").weights(), strict=False)

        It is also what `weights=`, `start=` and `start_weights=` take. Nothing is asked yet.

        Args:
            run: the id of the run that it is of, where several users share one of this name.

        Raises:
            InvalidJob: that is no name that a state can have, or no run's id.
        """
        from gradbox.runs import RunState

        ref = checked(StateRef, where="client.saved", run=run, save=name)
        return RunState(self._run_client, ref)

    def runs(
        self, *, name: str | None = None, limit: int | None = None, everybodys: bool = False
    ) -> Iterator[TrainRun]:
        """Iterate over this user's runs, or those of all users, newest first.

        Args:
            name: only those of that name.
            limit: at most so many; None is all.
            everybodys: the runs of all users; for the box's owner.

        Raises:
            OwnerOnly: everybody's runs were asked for, and the token is not the box's owner's.
        """
        asked = {"name": name, "all": "true" if everybodys else None}
        first, views = self._listed("/v1/runs", RunList, lambda page: page.runs, asked, limit)
        return Iterated(map(self._run_handle, views), html=first._repr_html_)

    def store(
        self,
        name: str,
        *,
        model: str,
        wrt: str | Sequence[str] | None = None,
        projection: Projection | None = None,
        dtype: RowDtype = "fp16",
        mode: Mode = "eval",
        precision: Precision = "fp32",
        seed: int = 0,
        weights: OfARun | str | None = None,
    ) -> GradStore:
        """Make a gradient store, or open the one of that name: rows that stay on the box.

            store = client.store("wiki", model="minilm", projection=PerLayer(dim=16))
            store.add(inputs=shards, loss=loss, ids=ids)

        Args:
            name: letters, digits, dots, dashes and underscores; unique among this user's.
            model: NAME, or NAME@VERSION. All rows are of the version that it is now.
            wrt: globs over the names of parameters, as for `PerSampleGradient`.
            projection: `PerLayer(dim)`, `CountSketch(dim)` or `Rademacher(dim)`; None keeps rows
                whole.
            dtype: in which rows are stored.
            mode: as for `PerSampleGradient`, of all rows.
            precision: likewise.
            seed: of the projection, and of random numbers in the model.
            weights: a run, a state of one or the name of a saved one, on whose weights rows are.

        Raises:
            StoreConflict: this user has a store of that name which is made in another way.
            InvalidJob, InvalidInputs: an argument is none that a store can have.
            UnknownModel, RunNotFound: there is no such model, or no such state.
        """
        from gradbox.stores.begin import store_spec

        given: dict[str, Any] = {"mode": mode, "precision": precision, "seed": seed}
        spec = store_spec(name, model, wrt, projection, weights, dtype=dtype, **given)
        body, headers = spec.model_dump_json().encode(), {"Content-Type": "application/json"}
        send = self._connection.request
        answer = send("POST", "/v1/stores", body=lambda: [body], headers=headers)
        return self._store_handle(parsed(StoreView, answer))

    def find_store(self, name: str) -> GradStore:
        """Return a store of this user's by its name, or another one's by OWNER/NAME.

        Raises:
            StoreNotFound: there is none that this user may read.
        """
        for store in self._stores(name):
            return store
        raise StoreNotFound(
            f"expected NAME of a store of yours, or OWNER/NAME of one that you may read, got "
            f"{name!r:.120}; `gradbox stores list` shows them"
        )

    def stores(self) -> list[GradStore]:
        """Return the stores that this user may read, newest first."""
        return self._stores(None)

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

    def _stores(self, name: str | None) -> list[GradStore]:
        query = "" if name is None else f"?{httpx.QueryParams(name=name)}"
        answer = self._connection.request("GET", f"/v1/stores{query}")
        return [self._store_handle(view) for view in parsed(StoreList, answer).stores]

    def _store_handle(self, view: StoreView) -> GradStore:
        from gradbox.stores import GradStore

        return GradStore(self._run_client, view)

    def _listed(
        self,
        path: str,
        kind: type[Page],
        views: Callable[[Page], list[Listing]],
        asked: Mapping[str, str | None],
        limit: int | None,
    ) -> tuple[Page, Iterator[Listing]]:
        """Return the first page of a list, and all views, whose pages are fetched as they come."""

        def fetch(cursor: str | None, num_wanted: int | None) -> Page:
            size = None if num_wanted is None else str(min(num_wanted, PAGE))
            query = {**asked, "limit": size, "cursor": cursor}
            given = httpx.QueryParams({k: v for k, v in query.items() if v is not None})
            answer = self._connection.request("GET", f"{path}?{given}" if given else path)
            return parsed(kind, answer)

        def all_of(page: Page) -> Iterator[Listing]:
            left = limit
            while True:
                yield from views(page)
                left = None if left is None else left - len(views(page))
                if page.next is None or (left is not None and left <= 0):
                    return
                page = fetch(page.next, left)

        first = fetch(None, limit)
        return first, all_of(first)

    def _run_handle(self, view: RunView) -> TrainRun:
        from gradbox.runs import TrainRun

        return TrainRun(self._run_client, view)

    @property
    def _run_client(self) -> RunClient:
        from gradbox.runs import RunClient

        return RunClient(self._connection, self._submitter, self._handle)

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
        return Job(
            self._connection,
            answered.view,
            waits=self._waits,
            result=answered.small,
            results=self._results,
            held=answered.result if isinstance(answered, Ended) else None,
        )
