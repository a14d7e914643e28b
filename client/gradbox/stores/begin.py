"""What makes a store, read from the arguments of `client.store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradbox.computations.computation import checked, globs
from gradbox.errors import InvalidJob
from gradbox.protocol import StoreSpec
from gradbox.runs.begin import state_of
from gradbox.stores.projections import Projection


def store_spec(
    name: str,
    model: str,
    wrt: str | Sequence[str] | None,
    projection: Any,
    weights: Any,
    **given: Any,
) -> StoreSpec:
    """Return the spec of a store.

    Raises:
        InvalidJob: an argument is none that a store can have.
    """
    if projection is not None and not isinstance(projection, Projection):
        raise InvalidJob(
            f"projection: expected PerLayer(dim), CountSketch(dim), Rademacher(dim) or None, got "
            f"{projection!r:.120}"
        )
    return checked(
        StoreSpec,
        where="client.store",
        name=name,
        model=model,
        wrt=globs(wrt),
        projection=None if projection is None else projection.spec,
        state=state_of(weights, "weights"),
        **given,
    )
