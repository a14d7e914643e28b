"""`gradbox pause | resume | drain`: whether the box hands jobs to its workers; for its owner."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated, Final

import typer

from gradbox.cli.output import AsJson, say, say_json
from gradbox.client import GradClient
from gradbox.errors import ServiceUnavailable
from gradbox.http.connection import Connection, Retry
from gradbox.job import Job
from gradbox.protocol import JobState, OperationMode, OperationOrder, OperationView
from gradbox.settings import find_settings

LOOK_S: Final = 0.5

Reason = Annotated[
    str, typer.Option(metavar="TEXT", help="told to everybody whose jobs wait or are refused")
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="return at once")]


def pause(*, reason: Reason = "", json: AsJson = False) -> int:
    """Let what runs go on, and hand out nothing more."""
    return _say(_set(OperationMode.PAUSED, reason), json=json)


def resume(*, json: AsJson = False) -> int:
    """Hand jobs out again."""
    return _say(_set(OperationMode.RUNNING), json=json)


def drain(*, reason: Reason = "", no_wait: NoWait = False, json: AsJson = False) -> int:
    """Take no new jobs, hand out nothing more, and wait until nothing runs."""
    code = _say(_set(OperationMode.DRAINING, reason), json=json)
    if not no_wait:
        _until_nothing_runs(quiet=json)
    return code


def _set(mode: OperationMode, reason: str = "") -> OperationView:
    order = OperationOrder(mode=mode, reason=reason)
    with closing(Connection(find_settings())) as connection:
        return connection.ask(OperationView, "PUT", "/v1/operation", order)


def _say(operation: OperationView, *, json: bool) -> int:
    if json:
        say_json(operation.model_dump(mode="json"))
    else:
        say(f"the box is {operation}")
    return 0


def _until_nothing_runs(*, quiet: bool) -> None:
    shown: list[str] = []
    with GradClient(retry=Retry(patience_s=0)) as client:
        while True:
            try:
                running = list(client.jobs(state=JobState.RUNNING, everybodys=True))
            except ServiceUnavailable:  # `gradbox up` ends by itself then
                break
            ids = [job.id for job in running]
            if not ids:
                break
            if not quiet and ids != shown:
                say("\n".join(_waits_for(job) for job in running))
                shown = ids
            time.sleep(LOOK_S)
    if not quiet:
        say("nothing runs any more")


def _waits_for(job: Job) -> str:
    return f"waiting for job {job.id} of {job.view.owner} on {job.view.model}"
