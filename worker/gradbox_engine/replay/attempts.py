"""A job is tried by the fast way, and by the sure one where that failed for want of something."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.model.tables import dense_tables, gives_rows
from gradbox_engine.replay.ungraphed import GraphMissed, refute

T = TypeVar("T")


def attempted(model: nn.Module, attempt: Callable[[], T]) -> T:
    """Run an attempt, which begins with the model as it was registered, until it ends by itself.

    Shards that went without graphs are given them if that went wrong, see `ungraphed`, and tables
    give dense gradients if the model failed for their being sparse, see `tables`.
    """
    try:
        return attempt()
    except GraphMissed:
        refute(model)
    except ModelCallFailed as error:
        if "sparse" not in str(error).lower() or not gives_rows(model):
            raise
        with dense_tables(model):
            return attempted(model, attempt)
    return attempted(model, attempt)
