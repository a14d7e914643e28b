"""Runs: training on the box, a job a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import anyio.to_thread
from fastapi import Path, Query, Request, Response

from gradbox.errors import RunNotFound
from gradbox.protocol import History, JobView, RunList, RunView, StateRef
from gradbox_service.admission.posting import Admission, Sent
from gradbox_service.admission.training import ask_weights, make_run, post_step, save_state
from gradbox_service.backing import Backing
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.database.conditional_commands import until_current
from gradbox_service.http.auth import Box, Caller, Credentials
from gradbox_service.http.openapi import (
    JOB_ANSWER,
    PREFER,
    RUN_REQUEST,
    any_of,
    json_body,
    posts_a_job,
    with_blobs,
)
from gradbox_service.http.paging import Cursor, Everybodys, Limit, behind, check_may_list, page_of
from gradbox_service.http.routes import Router
from gradbox_service.http.routes.jobs import answer_about, take_job, take_spec
from gradbox_service.runs.record import RunRecord, SaveRecord
from gradbox_service.runs.removal import delete_run, delete_save
from gradbox_service.runs.steps import under_way, visible

router = Router(prefix="/v1/runs", tags=["runs"])
saves = Router(prefix="/v1/saves", tags=["runs"])

MAX_STEPS = 1000
Number = Annotated[int, Path(ge=1, lt=2**53)]
WEIGHTS_ANSWER: Final[dict[str, Any]] = {
    "response_model": JobView,
    "responses": {
        200: JOB_ANSWER,
        202: {"model": JobView, "description": "Not yet", **JOB_ANSWER},
    },
    "openapi_extra": {"parameters": [PREFER]},
}


@router.post("", status_code=201, response_model=RunView, openapi_extra=RUN_REQUEST)
async def post_run(request: Request, credentials: Credentials) -> RunView:
    """Make a run. Its first step is the next job of it."""

    def make(body: bytes, sent: Sent, at: Admission) -> RunView:
        return _view(make_run(body, sent=sent, at=at), at.box)

    return await take_spec(request, credentials, make)


@router.get("")
def list_runs(
    box: Box,
    caller: Caller,
    name: Annotated[str | None, Query(max_length=200)] = None,
    limit: Limit = 100,
    everybodys: Everybodys = False,
    cursor: Cursor = None,
) -> RunList:
    """The caller's runs, newest first, in pages."""
    check_may_list(caller, everybodys=everybodys, what="runs")
    owned = box.runs.owned(None if everybodys else caller.name, after=behind(cursor))
    named = (run for run in owned if name in (None, run.spec.name))
    page, following = page_of(named, limit=limit)
    return RunList(runs=_views(page, box), next=following)


@router.get("/{run_id}")
def one_run(run_id: str, box: Box, caller: Caller) -> RunView:
    """One run."""
    return _view(visible(run_id, caller=caller, runs=box.runs), box)


@router.delete("/{run_id}", status_code=204)
def remove_run(run_id: str, box: Box, caller: Caller) -> None:
    """Delete a run, its states and its history; nothing happens where there is none (any more).

    409 while a step is under way or a save is left.
    """

    def remove() -> None:
        try:
            run = visible(run_id, caller=caller, runs=box.runs)
        except RunNotFound:
            return
        delete_run(run, runs=box.runs, records=box.records, files=box.run_files)

    until_current(remove)


@router.get("/{run_id}/steps")
def list_steps(
    run_id: str,
    box: Box,
    caller: Caller,
    after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_STEPS)] = MAX_STEPS,
) -> History:
    """The steps that were made, in their order, those after number `after`."""
    run = visible(run_id, caller=caller, runs=box.runs)
    first = max(after, run.first_step)
    return History(steps=list(box.runs.history(run.id, after=first, limit=limit)))


@router.post(
    "/{run_id}/steps/{number}",
    **posts_a_job(
        with_blobs(any_of("StepSpec", "CotangentStepSpec")),
        ended="The step has ended within the wait",
    ),
)
async def post_one_step(
    run_id: str, number: Number, request: Request, credentials: Credentials
) -> Response:
    """Make a step of a run, as a job: the next one, or the one that was made with this content.

    409 where the run is elsewhere.
    """
    return await take_job(request, credentials, partial(post_step, run_id=run_id, number=number))


@router.get("/{run_id}/weights", **WEIGHTS_ANSWER)
async def run_weights(
    run_id: str,
    request: Request,
    caller: Caller,
    credentials: Credentials,
    step: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    save: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    """A job whose result has the run's weights: the newest, after a step, or saved ones."""
    ref = StateRef.model_construct(run=run_id, step=step, save=save)
    return await _weights(ref, request, caller, credentials)


@saves.get("/{name}/weights", **WEIGHTS_ANSWER)
async def saved_weights(
    name: str, request: Request, caller: Caller, credentials: Credentials
) -> Response:
    """The same of a saved state, by its name: one of the caller's, or one that is shared."""
    ref = StateRef.model_construct(run=None, step=None, save=name)
    return await _weights(ref, request, caller, credentials)


@router.post(
    "/{run_id}/saves", **posts_a_job(json_body("SaveOrder"), ended="Saved within the wait")
)
async def post_save(run_id: str, request: Request, credentials: Credentials) -> Response:
    """Save a state of a run under a name, by a job. 409 where the name is another state's."""
    return await take_job(request, credentials, partial(save_state, run_id=run_id))


@router.delete("/{run_id}/saves/{name}", status_code=204)
def remove_save(run_id: str, name: str, request: Request, box: Box, caller: Caller) -> None:
    """Delete a saved state; nothing happens where there is none (any more).

    409 while a job needs it.
    """
    cleaner: Cleaner = request.app.state.cleaner
    run = visible(run_id, caller=caller, runs=box.runs)
    until_current(
        lambda: delete_save(
            run,
            name,
            needed=cleaner.needed(),
            runs=box.runs,
            records=box.records,
            files=box.run_files,
        )
    )


async def _weights(
    ref: StateRef, request: Request, caller: Caller, credentials: Credentials
) -> Response:
    at = request.app.state.admission
    record = await anyio.to_thread.run_sync(lambda: ask_weights(ref, sent=Sent(caller), at=at))
    posted = not record.state.final
    return await answer_about(record, request, credentials, caller=caller, posted=posted)


def _view(run: RunRecord, box: Backing) -> RunView:
    return _views([run], box)[0]


def _views(runs: Sequence[RunRecord], box: Backing) -> list[RunView]:
    saves: dict[str, Sequence[SaveRecord]] = {
        owner: box.runs.saves(owner) for owner in {run.owner for run in runs}
    }
    return [
        run.view(
            saves=[
                save.view()
                for save in saves[run.owner]
                if save.run == run.id and save.size_bytes is not None
            ],
            under_way=under_way(run, box.records),
        )
        for run in runs
    ]
