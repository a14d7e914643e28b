"""Runs that are made, and the jobs that they have: their steps, and what is asked of their states.

What a job follows from, its run or a save, may change while the job is checked: then it is all
looked at again, see `Outdated`.
"""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, Final

from gradbox.errors import InvalidInputs, InvalidJob, ServiceUnavailable
from gradbox.protocol import (
    CotangentStepSpec,
    ModelView,
    RunSpec,
    SaveOrder,
    StateRef,
    StateSpec,
    StepSpec,
    check_optimizer,
    parse_as,
    parse_posted,
    posted_document,
    spec_digest,
)
from gradbox_service.admission.forward_job import ForwardJob, forward_job
from gradbox_service.admission.limits import check_limits, check_memory, check_values
from gradbox_service.admission.model import find_model
from gradbox_service.admission.parameters import matching, near_misses
from gradbox_service.admission.posting import MEMORY_S, Admission, Sent, queue
from gradbox_service.backing import Backing
from gradbox_service.database.conditional_commands import Beside, Outdated, until_current
from gradbox_service.jobs import JobRecord
from gradbox_service.runs.record import RunRecord, SaveRecord
from gradbox_service.runs.states import SettledState, is_taken, settled
from gradbox_service.runs.steps import completed, conflict, earlier_job, from_run, visible

# Begin the names of what a loss trains.
OF_THE_LOSS: Final = ("loss.", "loss_inputs.")


def make_run(body: bytes, *, sent: Sent, at: Admission) -> RunRecord:
    """Check what makes a run and make it, or return the run that the same key has made.

    Raises:
        InvalidJob: the body makes none, or its optimizer, model, `wrt` or `start` do not fit.
        RunNotFound: there is no state of `start`.
        IdempotencyConflict: the key came before with another run.
        ServiceUnavailable: no worker has said yet which models there are, or Redis is full.
    """
    check_values(body, settings=at.settings)
    spec = parse_as(RunSpec, posted_document(body))
    box, owner, key, digest = at.box, sent.caller.name, sent.idempotency_key, spec_digest(spec)
    earlier = None if key is None else box.runs.posted(owner, key, digest=digest)
    if earlier is not None:
        return earlier
    check_memory(box.records.memory(within_s=MEMORY_S))
    check_optimizer(spec.optimizer)
    model = find_model(spec.model, workers=box.fleet.workers(), fleet=box.fleet)
    _check_trained(spec, model)
    _check_groups(spec, model)
    run_id, first = uuid.uuid4().hex, 0
    if spec.start is not None:
        start = settled(spec.start, caller=sent.caller, runs=box.runs, records=box.records)
        _check_start(spec, model, start)
        _keep_start(run_id, start, sent=sent, at=at)
        first = start.step if spec.start_moments else 0
        spec = spec.model_copy(update={"start": start.ref})
    run = RunRecord(
        id=run_id,
        owner=owner,
        spec=spec,
        model=model.name,
        model_version=model.version,
        created_s=time.time(),
        first_step=first,
        num_steps=first,
        kept_after=first,
    )
    made = box.runs.create(run, idempotency_key=key, digest=digest)
    if made.id != run_id:
        box.run_files.remove(run_id)
    return made


def post_step(body: bytes, run_id: str, number: int, *, sent: Sent, at: Admission) -> JobRecord:
    """Check a run's next step and queue its job, or return the job that this step is already.

    Raises:
        RunNotFound: the caller has no such run.
        RunConflict: the run is at another step, or this one has other content.
        InvalidJob: the body is no step of this run, or the box cannot make it.
        GradboxError: see `queue`.
    """
    check_values(body, settings=at.settings)
    document = posted_document(body)
    if document.setdefault("computation", "step") != "step":
        raise InvalidJob(f"computation: expected 'step', got {document['computation']!r:.100}")
    box = at.box

    def step_of(run: RunRecord) -> JobRecord:
        posted = parse_posted(completed(document, run, number))
        assert isinstance(posted, StepSpec | CotangentStepSpec)
        check_limits(posted, caller=sent.caller, settings=at.settings)
        if isinstance(posted, StepSpec) and posted.estimate:
            return queue(posted, sent=sent, at=at, run=run)
        content = spec_digest(posted)
        earlier = earlier_job(run, number, digest=content, runs=box.runs, records=box.records)
        if earlier is not None:
            return earlier
        spec, forward = _whole(posted, run, owner=sent.caller.name, box=box)
        return queue(
            spec,
            forward=forward,
            sent=sent,
            at=at,
            run=run,
            beside=lambda job: box.runs.posting(run, job=job, digest=content),
        )

    return until_current(lambda: step_of(visible(run_id, caller=sent.caller, runs=box.runs)))


def save_state(body: bytes, run_id: str, *, sent: Sent, at: Admission) -> JobRecord:
    """Queue the job that saves a state, or return the job that has done so already.

    Raises:
        RunNotFound: the caller has no such run, or its state after that step is not kept.
        RunConflict: another state of the owner has the name.
        GradboxError: see `queue`.
    """
    return _save(parse_as(SaveOrder, posted_document(body)), run_id, sent=sent, at=at)


def _save(order: SaveOrder, run_id: str, *, sent: Sent, at: Admission) -> JobRecord:
    box, sent = at.box, Sent(sent.caller, traceparent=sent.traceparent)

    def saved(run: RunRecord) -> JobRecord:
        step = run.num_steps if order.step is None else order.step
        before = box.runs.save(run.owner, order.name)
        if before is not None and is_taken(before, box.records):
            return _saved_before(order, before, run, step, box=box)
        ref = StateRef(run=run.id, step=step)
        state = settled(ref, caller=sent.caller, runs=box.runs, records=box.records)
        spec = _state_spec(state, save=order.name, shared=order.shared)
        save = partial(SaveRecord.of, run, order.name, step=step, shared=order.shared)

        def saving(job: str) -> Beside:
            return box.runs.saving(save(job=job, now_s=time.time()), before=before)

        return queue(spec, sent=sent, at=at, run=run, beside=saving)

    return until_current(lambda: saved(visible(run_id, caller=sent.caller, runs=box.runs)))


def ask_weights(ref: StateRef, *, sent: Sent, at: Admission) -> JobRecord:
    """Queue the job whose result has the weights of a state, or return the one that has.

    Raises:
        RunNotFound: see `settled`.
        GradboxError: see `queue`.
    """
    box, caller = at.box, sent.caller.name

    def weights_of(state: SettledState) -> JobRecord:
        before = box.runs.weights_job(caller, state.run.id, state.step)
        job = box.records.get(before) if before else None
        if job is not None and (job.result_bytes or not job.state.final):
            return job
        spec, named = _state_spec(state), (caller, state.run.id, state.step)
        return queue(
            spec,
            sent=sent,
            at=at,
            run=state.run,
            beside=lambda job: box.runs.asking(*named, job=job, before=before),
        )

    return until_current(
        lambda: weights_of(settled(ref, caller=sent.caller, runs=box.runs, records=box.records))
    )


def _check_trained(spec: RunSpec, model: ModelView) -> None:
    """Check the names in `wrt`, or the adapter's targets.

    Raises:
        InvalidJob: there are both.
        InvalidInputs: a pattern matches nothing.
    """
    parameters = model.parameter_names()
    if spec.adapter is None:
        where, patterns = "wrt", spec.wrt or ()
        known = [glob for glob in patterns if matching(glob, parameters)]
    else:
        if spec.wrt is not None:
            raise InvalidJob(
                "wrt: expected none beside an adapter, which is all that is trained; its targets "
                "say where"
            )
        where, patterns = "adapter.targets", spec.adapter.targets
        layers = {name.rpartition(".")[0] for name in parameters}
        known = [glob for glob in patterns if any(fnmatchcase(name, glob) for name in layers)]
    for glob in patterns:
        if glob not in known:
            raise InvalidInputs(
                f"{where}: {glob!r} matches nothing of model {model.name!r}"
                f"{near_misses(glob, parameters)}"
            )


def _check_groups(spec: RunSpec, model: ModelView) -> None:
    """Check the names in the optimizer's groups, as far as they are known.

    What an adapter's parameters are called, and those of a loss, the first step knows and checks.

    Raises:
        InvalidInputs: a pattern matches no parameter that is trained.
    """
    if spec.adapter is not None:
        return
    parameters = model.parameter_names()
    named = chain(*(matching(glob, parameters) for glob in spec.wrt or ["*"]))
    trained = [*dict.fromkeys(model.tied.get(name, name) for name in named)]
    for glob in chain(*(group.wrt for group in spec.optimizer.groups)):
        begin = re.split(r"[*?[]", glob, maxsplit=1)[0]
        of_loss = any(of.startswith(begin) or begin.startswith(of) for of in OF_THE_LOSS)
        if not of_loss and not matching(glob, trained):
            raise InvalidInputs(
                f"optimizer: groups: {glob!r} matches no parameter that the run trains"
                f"{near_misses(glob, trained)}"
            )


def _check_start(spec: RunSpec, model: ModelView, start: SettledState) -> None:
    """Check that a run can go on from a state.

    Raises:
        InvalidJob: that is of another model, or its moments are of another optimizer.
    """
    source = start.run.spec
    weights_alone = "take its weights alone (start_weights=, start_moments false)"
    of_model = (model.version, spec.adapter)
    if of_model != (start.run.model_version, source.adapter):
        raise InvalidJob(
            f"start: expected a state of {model.name}@{model.version[:12]} with the same adapter, "
            f"got one of run {start.run.id}, which trains {start.run.model}@"
            f"{start.run.model_version[:12]}; start from another state"
        )
    if not spec.start_moments:
        return
    for name, wanted, found in (
        ("wrt", spec.wrt, source.wrt),
        ("optimizer", spec.optimizer.name, source.optimizer.name),
        (
            "optimizer.groups",
            [group.wrt for group in spec.optimizer.groups],
            [group.wrt for group in source.optimizer.groups],
        ),
    ):
        if wanted != found:
            raise InvalidJob(
                f"{name}: expected {found!r:.100} as run {start.run.id} has, whose moments the "
                f"run goes on with, got {wanted!r:.100}; or {weights_alone}"
            )


def _keep_start(run_id: str, start: SettledState, *, sent: Sent, at: Admission) -> None:
    """Keep the state that a run begins with, by a save of its own where no file has it yet.

    Raises:
        ServiceUnavailable: that is yet to be written; the same post finds it a moment later.
    """
    box = at.box
    with suppress(FileNotFoundError):
        box.run_files.start(run_id, start.ref)
        return
    name = f"start-{start.run.id}-{start.step}"
    job = _save(SaveOrder(name=name, step=start.step), start.run.id, sent=sent, at=at)
    save = box.runs.save(start.run.owner, name)
    if save is None or save.size_bytes is None:
        raise ServiceUnavailable(
            f"start: the state after step {start.step} of run {start.run.id} is in a device's "
            f"memory, and job {job.id} writes it to the disk: post the run again in a moment"
        )
    box.run_files.start(run_id, StateRef(run=start.run.id, save=name))
    with suppress(Outdated):
        box.runs.unsave(save)
        box.run_files.remove_save(start.run.id, name)


def _whole(
    posted: StepSpec | CotangentStepSpec, run: RunRecord, *, owner: str, box: Backing
) -> tuple[StepSpec, ForwardJob | None]:
    """Return a step's whole spec, and the forward job that its cotangents belong to.

    Raises:
        RunConflict: that ran on another state.
        InvalidJob: it ran in another way than the step, or there is none.
    """
    if isinstance(posted, StepSpec):
        return posted, None
    forward = forward_job(posted.loss.forward, owner=owner, box=box)
    of, named = forward.spec, f"loss.forward: job {forward.record.id}"
    if of.state != StateRef(run=run.id, step=posted.number - 1):
        raise conflict(run, f"{named} did not run on its newest state", box.records)
    if of.weights:
        raise InvalidJob(f"{named}: expected no weights beside those of the run, got some")
    for name in ("mode", "precision", "seed"):
        wanted, found = from_run(run, posted.number)[name], getattr(of, name)
        if wanted != found:
            raise InvalidJob(
                f"{named}: expected {name} {wanted!r}, which step {posted.number} has, got "
                f"{found!r}; run it again so"
            )
    return forward.complete(posted, StepSpec, state=None, wrt=run.spec.wrt), forward


def _saved_before(
    order: SaveOrder, save: SaveRecord, run: RunRecord, step: int, *, box: Backing
) -> JobRecord:
    """Return the job of a save that has the name already, which is shared as asked from now on."""
    job = box.records.get(save.job)
    if (save.run, save.step) != (run.id, step) or job is None:
        what = f"the name {save.name!r} is that of step {save.step} of run {save.run}"
        raise conflict(run, what, box.records, then="take another name, or delete that one")
    if save.shared != order.shared:
        box.runs.share(save, shared=order.shared)
    return job


def _state_spec(state: SettledState, **save: Any) -> StateSpec:
    return StateSpec(computation="state", model=state.run.full_model, state=state.ref, **save)
