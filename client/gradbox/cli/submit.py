"""`gradbox submit JOB.toml`: any computation from files; `--again ID`: one that the box has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.completion import complete_job
from gradbox.cli.job_file import Again, read_job
from gradbox.cli.jobs import find_job, say_how_it_ended
from gradbox.cli.output import AsJson, complain, say, say_json
from gradbox.cli.result import OutputFile, check_folder, fetch
from gradbox.client import GradClient
from gradbox.computations import Cotangents
from gradbox.errors import InvalidJob
from gradbox.estimate import Estimate

JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="the job; docs/cli.md says what it holds")
]
JobAgain = Annotated[
    str | None,
    typer.Option(
        "--again",
        metavar="ID",
        help="this job once more, from what the box has of it",
        autocompletion=complete_job,
    ),
]
Ask = Annotated[
    bool, typer.Option("--estimate", help="say what the job would take, and submit nothing")
]
Wait = Annotated[bool, typer.Option("--wait", help="wait until the job is over")]


def run(
    job_file: JobFile = None,
    *,
    again: JobAgain = None,
    estimate: Ask = False,
    wait: Wait = False,
    output: OutputFile = None,
    json: AsJson = False,
) -> int:
    """Submit the job and print its id; with -o wait for it and fetch its result."""
    if (job_file is None) == (again is None):
        raise typer.BadParameter("expected JOB.toml, or --again with the id of a job")
    if output is not None and not check_folder(output):
        return 2
    asked = Again(again or "", {}) if job_file is None else read_job(job_file)
    if estimate and isinstance(asked, Again):
        raise typer.BadParameter("--estimate: expected a JOB.toml that describes all of a job")
    with GradClient() as client:
        continued = getattr(asked, "loss", None)
        if isinstance(continued, Cotangents):
            continued.forward = find_job(client, continued.forward).id
        try:
            if isinstance(asked, Again):
                job = client.again(find_job(client, asked.job).id, **asked.changes)
            elif estimate:
                return say_estimate(client.estimate(asked), json=json)
            else:
                job = client.submit(asked)
        except InvalidJob as error:
            error.args = (f"{job_file or again}: {error}",)
            raise
        if json and not wait and output is None:
            say_json(job.view.model_dump(mode="json"))
            return 0
        if not json:
            say(job.id)
        if job.view.hold is not None:
            complain(f"no job runs for now: the box is {job.view.hold}")
        if output is not None:
            return fetch(job, output, json=json)
        if not wait:
            return 0
        job.wait()
        if json:
            say_json(job.view.model_dump(mode="json"))
        return say_how_it_ended(job.view)


def say_estimate(estimate: Estimate, *, json: bool) -> int:
    """Print what a job would take; return 0 if it fits, else 1."""
    if json:
        say_json(estimate.model_dump(mode="json"))
    else:
        say(str(estimate))
    return 0 if estimate.fits else 1
