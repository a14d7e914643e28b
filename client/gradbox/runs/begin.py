"""What makes a run, read from the arguments of `client.train`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradbox.computations.computation import checked, globs, state_ref
from gradbox.errors import InvalidJob
from gradbox.protocol import RunSpec, StateRef
from gradbox.runs.optimizer import LoRA, Optimizer


def run_spec(
    model: str,
    optimizer: Any,
    adapter: Any,
    start: Any,
    start_weights: Any,
    *,
    wrt: str | Sequence[str] | None,
    **given: Any,
) -> RunSpec:
    """Return the spec of a run.

    Raises:
        InvalidJob: an argument is none that a run can have.
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidJob(
            f"optimizer: expected one that the box has, such as Optimizer('adamw', lr=1e-3), got "
            f"{optimizer!r:.120}"
        )
    if adapter is not None and not isinstance(adapter, LoRA):
        raise InvalidJob(
            f"adapter: expected LoRA(rank, alpha, targets), or None, got {adapter!r:.120}"
        )
    if adapter is not None and wrt is not None:
        raise InvalidJob(
            "wrt: expected none beside adapter, which is all that is trained; its targets say where"
        )
    if start is not None and start_weights is not None:
        raise InvalidJob("expected start or start_weights, got both; start has the weights, too")
    return checked(
        RunSpec,
        model=model,
        optimizer=optimizer.spec,
        adapter=None if adapter is None else adapter.spec,
        wrt=globs(wrt),
        start=state_of(start, "start") or state_of(start_weights, "start_weights"),
        start_moments=start_weights is None,
        **given,
    )


def state_of(given: Any, where: str) -> StateRef | None:
    """Return the state that an argument stands for, if one is given.

    Raises:
        InvalidJob: it stands for none.
    """
    found = state_ref(given, where=where)
    if given is not None and found is None:
        raise InvalidJob(
            f"{where}: expected a run, a state of one or the name of a saved one, got "
            f"{given!r:.120}"
        )
    return found
