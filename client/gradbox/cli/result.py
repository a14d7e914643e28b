"""`gradbox result ID -o FILE`: fetch a result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.jobs import JobId, find_job, say_how_it_ended
from gradbox.cli.output import AsJson, complain, say, say_json
from gradbox.client import GradClient
from gradbox.job import Job

_OPTION = typer.Option("-o", "--output", metavar="FILE", help="a safetensors file to write")
OutputFile = Annotated[Path | None, _OPTION]
NeededFile = Annotated[Path, _OPTION]


def run(id: JobId, *, output: NeededFile, json: AsJson = False) -> int:
    """Wait for the job, write its result to the file and say what is in it."""
    if not check_folder(output):  # said now, and not when the job is done
        return 2
    with GradClient() as client:
        return fetch(find_job(client, id), output, json=json)


def check_folder(output: Path) -> bool:
    """Tell whether a result may be written to a file; complain of `-`, or of a missing folder."""
    why = "there is no such folder" if not output.parent.is_dir() else ""
    if str(output) == "-":
        why = "it is read and checked where it was written, which standard output cannot be"
    if why:
        _complain_of(output, why)
    return not why


def fetch(job: Job, output: Path, *, json: bool) -> int:
    """Wait for a job, write its result to a file, print what is in it, and return the exit code."""
    from gradbox.results.result import GradResult

    code = say_how_it_ended(job.wait())
    if code:
        return code
    try:
        job.fetch(output)
    except OSError as error:
        _complain_of(output, error.strerror or str(error))
        return 2
    result = GradResult.load(output)
    if json:
        say_json(result.manifest.model_dump(mode="json"), indent=2)
        return 0
    loss = result.manifest.loss
    reduced = result.manifest.reduce
    found = [] if loss is None else [f"loss {loss:.6g}"]
    counted = {"gradients": result.grads, "outputs": result.outputs}
    if reduced and reduced != "none":
        found.append(reduced)
        del counted["outputs"]
    found += [
        f"{len(named)} {what if len(named) > 1 else what.removesuffix('s')}"
        for what, named in counted.items()
        if named
    ]
    say(f"{output}: {', '.join(found)}")
    return 0


def _complain_of(path: Path, why: str) -> None:
    complain(
        f"result: expected a file that can be written, got {path}: {why}; name another one with -o"
    )
