"""A gradient store on the box: rows appended by jobs, queried by jobs, read by ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from gradbox.computations.computation import checked
from gradbox.errors import InvalidInputs
from gradbox.protocol import (
    LAB,
    CurvatureView,
    Grants,
    StoreFitSpec,
    StoreJobSpec,
    StoreQuerySpec,
    StoreRowsSpec,
    StoreView,
)
from gradbox.protocol.stores import CurvatureKind
from gradbox.results.result import GradResult, Tensors
from gradbox.runs.run import RunClient
from gradbox.stores.hits import Hits
from gradbox.stores.jobs import Id, StoreJob, StoreJobKeywords, fields_of, path_of
from gradbox.stores.rows import Form, RowMatrix, ids_in


class GradStore:
    """A store, from `client.store` or `client.find_store`.

    Args of `add`, `query` and `scores` are those of `PerSampleGradient`, but for what the store
    says itself: model, wrt, mode, precision, seed and how rows are projected.
    """

    def __init__(self, client: RunClient, view: StoreView) -> None:
        self._client, self._view = client, view

    def __repr__(self) -> str:
        view = self._view
        return f"<GradStore {view.owner}/{view.name}: {view.num_rows} rows of {view.model}>"

    def __len__(self) -> int:
        return self._view.num_rows

    @property
    def view(self) -> StoreView:
        """What the box said of it last; `refresh` asks again."""
        return self._view

    @property
    def id(self) -> str:
        return self._view.id

    @property
    def name(self) -> str:
        return self._view.name

    def refresh(self) -> StoreView:
        """Ask the box what there is now.

        Raises:
            StoreNotFound: it was deleted, or may not be read any more.
        """
        self._view = self._client.connection.ask(StoreView, "GET", self._path())
        return self._view

    def add(
        self,
        *,
        inputs: Any,
        loss: Callable[..., Any],
        ids: Sequence[Id],
        progress: bool | None = None,
        **options: Unpack[StoreJobKeywords],
    ) -> GradResult:
        """Append a row for each sample, by one job: all of them, or none.

        Args:
            inputs: shards, as for `PerSampleGradient`.
            loss: of the shape (B,), as for `PerSampleGradient`; the same one for all rows.
            ids: a whole number or a text for each sample, which the store has not.
            progress: as for `Job.wait`.
            options: loss_inputs, method, output, readout, unchecked, priority, timeout_s,
                devices, name.

        Returns:
            The job's result, which stays on the box: `manifest`, and `losses[:]` fetches those.

        Raises:
            InvalidInputs: an id is in the store already, or they are not one for each sample.
            InvalidJob: the loss is not that of the store's rows.
            StoreNotFound: the store was deleted, or is not this user's.
            JobFailed, JobCancelled, ServiceUnavailable: as for `Job.result`.
        """
        result = self._run(StoreRowsSpec, inputs, loss, progress, ids=ids, **options)
        self.refresh()
        return result

    def query(
        self,
        *,
        inputs: Any,
        loss: Callable[..., Any],
        top: int = 10,
        bottom: int = 0,
        unit_norm: bool = False,
        precondition: CurvatureKind | None = None,
        damping: float | None = None,
        progress: bool | None = None,
        **options: Unpack[StoreJobKeywords],
    ) -> Hits:
        """Return the rows with the largest ⟨row of a query, row⟩ for each of Q queries.

        Args:
            inputs: shards of the queries.
            loss: of the shape (Q,).
            top: how many rows for each query.
            bottom: how many more with the smallest scores, which harm the query most.
            unit_norm: whether both rows are scaled to norm 1: cosines.
            precondition: a curvature H that was fitted: the query's row is multiplied by (H + λ)⁻¹,
                before it is scaled.
            damping: λ, by default that of the fit.
            progress: as for `Job.wait`.
            options: as for `add`.

        Raises:
            InvalidJob: the store has no rows, or no such curvature.
            StoreNotFound: the store was deleted, or may not be read any more.
            JobFailed, JobCancelled, ServiceUnavailable: as for `Job.result`.
        """
        own: dict[str, Any] = {"unit_norm": unit_norm, "precondition": precondition}
        own |= {"damping": damping, "top": top, "bottom": bottom}
        result = self._run(StoreQuerySpec, inputs, loss, progress, own=own, **options)
        found = Tensors(result._file, "samples")
        num_hits = found["rows"].shape[1]
        ids = ids_in(result._file)
        return Hits(
            ids=[ids[at : at + num_hits] for at in range(0, len(ids), num_hits)],
            scores=found["scores"],
            rows=found["rows"],
            losses=found["loss"],
            manifest=result.manifest,
            num_smallest=max(0, num_hits - top),
        )

    def scores(
        self,
        *,
        inputs: Any,
        loss: Callable[..., Any],
        unit_norm: bool = False,
        precondition: CurvatureKind | None = None,
        damping: float | None = None,
        progress: bool | None = None,
        **options: Unpack[StoreJobKeywords],
    ) -> Any:
        """Return ⟨row of a query, row⟩ for all rows, (Q, N); as for `query`."""
        own = {"unit_norm": unit_norm, "precondition": precondition, "damping": damping}
        result = self._run(StoreQuerySpec, inputs, loss, progress, own=own, **options)
        return Tensors(result._file, "samples")["scores"]

    def fit(
        self,
        kind: CurvatureKind,
        *,
        inputs: Any = None,
        loss: Callable[..., Any] | None = None,
        damping: float | None = None,
        progress: bool | None = None,
        **options: Unpack[StoreJobKeywords],
    ) -> CurvatureView:
        """Keep curvature H with the store, for queries; in place of an earlier one of its kind.

            store.fit("ekfac", inputs=sample, loss=loss, loss_inputs={"labels": labels})
            store.query(inputs=test, loss=loss, precondition="ekfac")

        Args:
            kind: "kfac" or "ekfac", of samples: by layers, linear and convolution; others are left
                out by name. They need whole rows or `PerLayer`. "kernel" is TRAK's, ΦᵀΦ/N of the
                store's rows, by parameters where these have more than 8192 numbers.
            inputs: shards of samples; none for "kernel".
            loss: of the shape (B,), likewise.
            damping: what queries add to H; by default 0.1 of the mean eigenvalue of each block.
            progress: as for `Job.wait`.
            options: as for `add`.

        Returns:
            What was fitted, as `curvature` has it.

        Raises:
            InvalidJob: the store's rows have no such curvature.
            StoreNotFound: the store was deleted, or is not this user's.
            JobFailed, JobCancelled, ServiceUnavailable: as for `Job.result`.
        """
        own = {"curvature": kind, "damping": damping}
        if inputs is None and loss is None:
            fields = {**fields_of(self._view, StoreFitSpec), **own, **options}
            spec = checked(StoreFitSpec, **fields).model_dump_json(exclude_defaults=True)
            path = path_of(self._view, StoreFitSpec)
            self._client.ask("POST", path, spec.encode()).open(progress=progress)
        else:
            self._run(StoreFitSpec, inputs, loss, progress, own=own, **options)
        self.refresh()
        return self.curvature[kind]

    @property
    def curvature(self) -> dict[str, CurvatureView]:
        """What was fitted, by kind: its layers, what it leaves out, of how many samples."""
        return {found.kind: found for found in self._view.curvature}

    @property
    def rows(self) -> RowMatrix:
        """The rows as they are stored, (N, K): `store.rows[100:200]` fetches those alone."""
        return RowMatrix(self._client.connection, self._path(), self._view)

    def ids(self) -> list[Id]:
        """Return the ids of all rows, in their order."""
        return self.rows.ids()

    def losses(self) -> Any:
        """Return the losses of all rows, (N,), a NumPy array."""
        return self.rows.losses()

    def grant(self, *people: str) -> None:
        """Let people read and query the store, by the names of their tokens; "*" is everybody."""
        self._grant({*self.refresh().grants, *people})

    def revoke(self, *people: str) -> None:
        """Let people no longer read the store, from now on; "*" is the grant to everybody."""
        self._grant({*self.refresh().grants} - {*people})

    def export(self, folder: str | Path, *, form: Form = "safetensors") -> Path:
        """Write all rows with their ids into a new folder.

        Args:
            folder: is made.
            form: "safetensors", the parts as they are on the box; or "bergson", one file of all
                rows that `bergson.data.load_gradients(folder)` opens, and ids.json beside it.
        """
        return self.rows.save(Path(folder), form)

    def delete(self) -> None:
        """Delete the store with its rows; nothing happens if it is gone.

        Raises:
            StoreConflict: a job appends to it or queries it.
            StoreNotFound: it is not this user's.
        """
        self._client.connection.request("DELETE", self._path())

    def _grant(self, people: set[str]) -> None:
        if not all(isinstance(one, str) and one for one in people):
            raise InvalidInputs(f"grant: expected names of tokens, or {LAB!r}, got others")
        ask, grants = self._client.connection.ask, Grants(grants=sorted(people))
        self._view = ask(StoreView, "PUT", self._path("/grants"), grants)

    def _run(
        self,
        spec: type[StoreJobSpec],
        inputs: Any,
        loss: Any,
        progress: bool | None,
        **given: Any,
    ) -> GradResult:
        view = self._view
        job = StoreJob(model=view.model, inputs=inputs, loss=loss, store=view, spec=spec, **given)
        if spec is StoreQuerySpec:
            return self._client.run(job, progress=progress)
        # What a store keeps is not fetched.
        return self._client.post(job, progress=progress).open(progress=progress)

    def _path(self, below: str = "") -> str:
        return f"/v1/stores/{self.id}{below}"
