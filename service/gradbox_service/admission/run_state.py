"""A job on the weights of a run: which state that is, and is the model the run's."""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.protocol import JobSpec
from gradbox_service.admission.model import MIN_VERSION_LENGTH
from gradbox_service.backing import Backing
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.runs.record import RunRecord
from gradbox_service.runs.states import settled


def settle_state(
    spec: JobSpec, *, caller: TokenInfo, box: Backing
) -> tuple[JobSpec, RunRecord | None]:
    """Return a spec that names a state by its step or its save, and the run's model in full.

    And the run, if there is one.

    Raises:
        RunNotFound: see `settled`.
        InvalidInputs: the model is another one.
    """
    if spec.state is None:
        return spec, None
    state = settled(spec.state, caller=caller, runs=box.runs, records=box.records)
    if not is_model_of(state.run, spec.model):
        raise InvalidInputs(
            f"model: expected {state.run.model!r}, whose weights run {state.run.id} has, in "
            f"version {state.run.model_version[:16]}, got {spec.model!r:.100}"
        )
    update = {"state": state.ref, "model": state.run.full_model}
    return spec.model_copy(update=update), state.run


def is_model_of(run: RunRecord, model: str) -> bool:
    """Return whether NAME or NAME@VERSION is the model that a run trains."""
    name, at, version = model.partition("@")
    if name != run.model or not at:
        return name == run.model
    return len(version) >= MIN_VERSION_LENGTH and run.model_version.startswith(version)
