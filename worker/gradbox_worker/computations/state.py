"""Jobs on the state of a run: every computation can be, and a state itself can be the answer.

The run's weights and buffers are laid over the model's; of a run with an adapter, over its own
structure's. Weights that the job gives lie over these.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gradbox.errors import InvalidInputs
from gradbox.protocol import SharedSpec, StateRef, StateSpec, StepSpec
from gradbox_worker.computations import step
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import section
from gradbox_worker.runs import RunStates
from gradbox_worker.runs.adapters import peft_names


def on_run(job: LoadedJob, runs: RunStates | None) -> LoadedJob:
    """Return a job on the state of the run that its spec names; the same job if it names none.

    Raises:
        InvalidInputs: the state is not there, or of another model, or the device keeps no runs.
    """
    spec = job.work.spec
    ref = _state_of(spec)
    if ref is None:
        return job
    if runs is None or ref.run is None:
        raise InvalidInputs(
            "expected a device that keeps the states of runs, got one that does not: jobs on a "
            "run's weights run on one device"
        )
    if ref.save is not None:
        held = runs.saved(ref.run, ref.save, job.loaded)
    else:
        held = runs.at(ref.run, ref.step, job.loaded, partial(step.again, job))
    if isinstance(spec, StepSpec) and held.run.num_steps != spec.number - 1:
        raise InvalidInputs(
            f"expected step {held.run.num_steps + 1} of run {held.run.id}, which is the next, got "
            f"step {spec.number}"
        )
    return step.at(job, held)


def run_of(spec: SharedSpec) -> str | None:
    """Return the run on whose state a job is; None if it is on none."""
    if isinstance(spec, StepSpec):
        return spec.run
    return None if spec.state is None else spec.state.run


def state_facts(job: LoadedJob) -> dict[str, Any]:
    """Return the fields of the receipt that say on which state a job ran, if it was no step."""
    if job.run is None or isinstance(job.work.spec, StepSpec):
        return {}
    return {"state_run": job.run.run.id, "state_step": job.run.state.num_steps}


def compute(job: LoadedJob, spec: StateSpec) -> Computed:
    """Return what a run trains and the buffers that it has changed, or save its state."""
    assert job.run is not None
    if spec.save is not None:
        saved_bytes = job.run.save(spec.save)
        return Computed(tensors={}, facts={}, seconds={}, saved_bytes=saved_bytes)
    state = job.run.state
    names = {} if job.run.run.spec.adapter is None else peft_names(job.run.module)
    weights = {names.get(name, name): tensor for name, tensor in state.masters.items()}
    buffers = {n: b for n, b in state.buffers.items() if not n.startswith(step.OF_LOSS)}
    tensors = section("weights", weights) | section("buffers", buffers)
    return Computed(tensors=tensors, facts={}, seconds={})


def _state_of(spec: SharedSpec) -> StateRef | None:
    """Return the state that a job is on; a step names none of its own."""
    if isinstance(spec, StepSpec):
        return StateRef(run=spec.run, step=spec.number - 1)
    return spec.state
