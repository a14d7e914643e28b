"""`gradbox result ID -o FILE`: fetch a result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.jobs import JobId, say_how_it_ended
from gradbox.cli.output import AsJson, complain, say, say_json

OutputFile = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="a safetensors file to write")
]


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    app.command("result", help="wait for a job and fetch its result")(run)


def run(id: JobId, *, output: OutputFile, json: AsJson = False) -> int:
    """Wait for the job, write its result to the file and say what is in it."""
    from gradbox.client import GradClient
    from gradbox.results.result import GradResult

    if not output.parent.is_dir():  # said now, and not when the job is done
        return _cannot_write(output, "there is no such folder")
    with GradClient() as client:
        job = client.job(id)
        code = say_how_it_ended(job.wait())
        if code:
            return code
        try:
            job.fetch(output)
        except OSError as error:
            return _cannot_write(output, error.strerror or str(error))
    result = GradResult.load(output)
    if json:
        say_json(result.manifest.model_dump(mode="json"), indent=2)
    else:
        loss = result.manifest.loss
        counted = {"gradients": result.grads, "outputs": result.outputs}
        found = ", ".join(f"{len(named)} {what}" for what, named in counted.items() if named)
        say(f"{output}: {'' if loss is None else f'loss {loss:.6g}, '}{found}")
    return 0


def _cannot_write(path: Path, why: str) -> int:
    complain(
        f"result: expected a file that can be written, got {path}: {why}; name another one with -o"
    )
    return 2
