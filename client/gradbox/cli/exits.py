"""How a command ends: its exit code, and what is printed with it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from gradbox.cli.output import complain
from gradbox.errors import (
    GradboxError,
    JobCancelled,
    JobFailed,
    ProtocolError,
    ServiceUnavailable,
)

DONE: Final = 0
JOB_FAILED: Final = 1
WRONG_USAGE: Final = 2
UNREACHABLE: Final = 3

Register = Callable[[typer.Typer], None]


class ExitCodes(TyperGroup):
    """The outermost group: its commands return an exit code, or raise the error that says it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that `ctx` names, print its error, and exit."""
        try:
            code: int | None = super().invoke(ctx)
            sys.stdout.flush()
        except GradboxError as error:
            complain("\n".join([str(error), *getattr(error, "__notes__", ())]))
            code = exit_code(error)
        except BrokenPipeError:
            # The reader of a pipe has had enough.
            _leave_stdout()
            code = DONE
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _leave_stdout()
            complain(
                f"{error.filename or 'what the command prints'} cannot be written: {error.strerror}"
            )
            code = WRONG_USAGE
        raise typer.Exit(code or DONE)


def _leave_stdout() -> None:
    """Send to nowhere what is still to be written, or Python complains about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: GradboxError) -> int:
    """Return the exit code that says what kind of error it is."""
    if isinstance(error, JobFailed | JobCancelled):
        return JOB_FAILED
    if error.category == "user":
        return WRONG_USAGE
    return UNREACHABLE if isinstance(error, ServiceUnavailable | ProtocolError) else JOB_FAILED


def code_of(app: typer.Typer, arguments: Sequence[str] | None) -> int:
    """Run an app whose group is `ExitCodes` and return its exit code."""
    # Python has no stdout where the caller closed it (`>&-`).
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for as long as we run
    try:
        get_command(app).main(arguments, prog_name="gradbox")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else DONE
    return DONE


def run_alone(register: Register, arguments: Sequence[str]) -> int:
    """Run one package's command without looking for the others, and return its exit code."""
    app = new_app(ExitCodes)
    register(app)
    return code_of(app, arguments)


def new_app(group: type[TyperGroup], **given: Any) -> typer.Typer:
    """Return an app that is a group even if it holds a single command."""
    # Plain help: rich's takes as long to import as all the rest, and prints the same in a box.
    app = typer.Typer(
        cls=group,
        rich_markup_mode=None,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        **{"add_completion": False, **given},
    )
    app.callback()(_nothing)
    return app


def _nothing() -> None:
    pass
