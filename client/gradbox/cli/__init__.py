"""The `gradbox` command: what a user needs, and what other packages join by entry points.

A package joins with an entry point in the group `gradbox.commands`: a function `register(app)` that
adds one command, or one group of commands, to a Typer app. It is loaded when its command is called,
so that `gradbox jobs list` imports no web server and `gradbox --help` imports no command at all. A
command returns its exit code, or raises the error that says it. To read in this order:

    commands        every command with its line in `gradbox --help`, loaded when it is called
    exits           how a command ends: exit codes, and what is printed with each
    output          what the commands print
    job_file        a job as a TOML file
    completion      what the shell completes by asking the box
    submit, jobs, result, runs, stores, blobs, top, operation, down, backup, doctor, login
                    one command or group each

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 the service cannot be reached, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from gradbox.cli.commands import gradbox
    from gradbox.cli.exits import code_of

    return code_of(gradbox(), argv)
