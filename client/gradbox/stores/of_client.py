"""What a client has of gradient stores: it makes them, and finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx

from gradbox.box_client import BoxClient
from gradbox.errors import StoreNotFound
from gradbox.protocol import StoreList, StoreView
from gradbox.runs.run import RunClient
from gradbox.stores.store import GradStore

if TYPE_CHECKING:
    from gradbox.computations.computation import OfARun
    from gradbox.protocol.options import Mode, Precision
    from gradbox.protocol.stores import RowDtype
    from gradbox.stores.projections import Projection


class StoresClient(BoxClient):
    """The part of a client that keeps gradients."""

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
        return self._store_handle(self._connection.ask(StoreView, "POST", "/v1/stores", spec))

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

    def _stores(self, name: str | None) -> list[GradStore]:
        query = "" if name is None else f"?{httpx.QueryParams(name=name)}"
        found = self._connection.ask(StoreList, "GET", f"/v1/stores{query}")
        return [self._store_handle(view) for view in found.stores]

    def _store_handle(self, view: StoreView) -> GradStore:
        of_box = RunClient(self._connection, self._submitter, self._handle)
        return GradStore(of_box, view)
