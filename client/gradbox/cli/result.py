"""`gradbox result ID -o FILE`: fetch a result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradbox.cli.jobs import say_how_it_ended
from gradbox.cli.output import complain, say, say_json


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "result", help="wait for a job and fetch its result"
    )
    parser.add_argument("id", help="the job")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="a safetensors file"
    )
    parser.add_argument("--json", action="store_true", help="print the receipt")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Wait for the job, write its result to the file and say what is in it."""
    from gradbox.client import GradClient
    from gradbox.results.result import GradResult

    if not args.output.parent.is_dir():  # said now, and not when the job is done
        return _cannot_write(args.output, "there is no such folder")
    with GradClient() as client:
        job = client.job(args.id)
        code = say_how_it_ended(job.wait())
        if code:
            return code
        try:
            job.fetch(args.output)
        except OSError as error:
            return _cannot_write(args.output, error.strerror or str(error))
    result = GradResult.load(args.output)
    if args.json:
        say_json(result.manifest.model_dump(mode="json"), indent=2)
    else:
        loss = result.manifest.loss
        counted = {"gradients": result.grads, "outputs": result.outputs}
        found = ", ".join(f"{len(named)} {what}" for what, named in counted.items() if named)
        say(f"{args.output}: {'' if loss is None else f'loss {loss:.6g}, '}{found}")
    return 0


def _cannot_write(path: Path, why: str) -> int:
    complain(
        f"result: expected a file that can be written, got {path}: {why}; name another one with -o"
    )
    return 2
