"""The `gradbox` command: what a user needs, and what other packages join by entry points.

A package joins with an entry point in the group `gradbox.commands`: a function
`register(subparsers)` that adds one command and sets `func=callable(args) -> int`. It is loaded
when its command is called, so that `gradbox jobs list` imports no web server (`plugins`). One
module a command: `jobs`, `result`, `login`, `version`; all print by `output`.

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 the service cannot be reached, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gradbox.cli import jobs, login, plugins, result, version
from gradbox.cli.output import complain
from gradbox.errors import (
    GradboxError,
    JobCancelled,
    JobFailed,
    ProtocolError,
    ServiceUnavailable,
)

DONE = 0
JOB_FAILED = 1
WRONG_USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    try:
        code: int = args.func(args)
        sys.stdout.flush()
        return code
    except GradboxError as error:
        complain("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return exit_code(error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gradbox"):
            raise
        install = plugins.how_to_install(args.func.__module__)
        complain(f"{error.name} is needed and not installed: {install}")
        return WRONG_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has had enough; Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def exit_code(error: GradboxError) -> int:
    """Return the exit code that says what kind of error it is."""
    if isinstance(error, JobFailed | JobCancelled):
        return JOB_FAILED
    if error.category == "user":
        return WRONG_USAGE
    return UNREACHABLE if isinstance(error, ServiceUnavailable | ProtocolError) else JOB_FAILED


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradbox",
        description="Gradients of large models, computed on a box that a team shares.",
        epilog="exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 no service can be reached",
    )
    parser.add_argument("--version", action="version", version=version.text())
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (jobs, result, login, version):
        command.register(subparsers)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    plugins.register(subparsers, chosen=chosen)
    return parser
