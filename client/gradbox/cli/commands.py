"""The `gradbox` group: it knows every command's name and line, and loads the one that is called.

The lines of commands that other packages bring stand here too: to ask a package for its line is to
import it. A command that is listed nowhere is shown all the same, under "Other commands".
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command

from gradbox.cli.exits import WRONG_USAGE, ExitCodes, new_app
from gradbox.cli.output import AsJson, complain, say, say_json, styled

GROUP: Final = "gradbox.commands"
OTHER: Final = "Other commands"
TOPICS: Final[Mapping[str, Mapping[str, str]]] = {
    "Jobs": {
        "submit": "submit a job that a TOML file describes",
        "jobs": "your jobs on the box",
        "result": "wait for a job and fetch its result",
        "runs": "training on the box: your runs, their states and saves",
        "stores": "gradients that stay on the box, queried by the whole lab",
        "blobs": "the tensors that you have sent to the box",
    },
    "A box, over the network": {
        "top": "devices and queue, live; q leaves it",
        "workers": "the box's workers, each with its device and job",
        "pause": "hand no more jobs to workers; what runs goes on, new jobs wait",
        "resume": "end a pause, or a drain that is not over",
        "drain": "refuse new jobs as well, and end the box once nothing runs",
    },
    "A box, on its own machine": {
        "up": "run a whole box on this machine: Redis, service, a worker for every device",
        "down": "stop the box that `gradbox up` runs on a data folder",
        "models": "the models of a box, and the file that names them",
        "tokens": "create, list and revoke tokens of this box",
        "storage": "what the box's files take, by owner; `storage clean` removes some",
        "backup": "copy a box's records, tokens, runs and models file, also while it runs",
        "service": "run the HTTP service alone",
        "worker": "run jobs on one device of this machine",
        "demo": "run the main job end to end on real text and a real pretrained model",
    },
    "This machine": {
        "doctor": "say what is wrong with an installation or a box, and the fix",
        "login": "keep a box's URL and token on this machine",
        "version": "say which gradbox",
    },
}
# The client's own commands: a function, or a group of them.
OWN: Final[Mapping[str, str]] = {
    "submit": "submit:run",
    "jobs": "jobs:commands",
    "result": "result:run",
    "runs": "runs:commands",
    "stores": "stores:commands",
    "blobs": "blobs:commands",
    "top": "top:top",
    "workers": "top:workers",
    "pause": "operation:pause",
    "resume": "operation:resume",
    "drain": "operation:drain",
    "down": "down:run",
    "backup": "backup:run",
    "doctor": "doctor:run",
    "login": "login:run",
    "version": "commands:version",
}
EPILOG: Final = "exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 no service can be reached"
# Which extra brings what a package of this distribution imports, and packages that tell.
EXTRAS: Final = {
    "gradbox_service": ("service", ("redis", "pydantic_settings", "fastapi", "uvicorn")),
    "gradbox_worker": ("worker", ("redis", "pydantic_settings", "rq", "torch")),
}
# Commands of such packages of which a part needs the client alone.
CLIENT_ENOUGH: Final = ("models",)


def line_of(name: str) -> str:
    """Return a command's line in `gradbox --help`."""
    return next((lines[name] for lines in TOPICS.values() if name in lines), "")


def entries() -> dict[str, metadata.EntryPoint]:
    """Return how each command is loaded: the client's own, and what other packages bring."""
    own = [metadata.EntryPoint(name, f"gradbox.cli.{OWN[name]}", GROUP) for name in OWN]
    return {entry.name: entry for entry in (*metadata.entry_points(group=GROUP), *own)}


class LazyCommand(TyperCommand):
    """What is known of a command before it is loaded."""

    def __init__(self, entry: metadata.EntryPoint) -> None:
        super().__init__(entry.name, help=line_of(entry.name))
        self.entry = entry

    def loaded(self) -> Any:
        """Load the command.

        Raises:
            ModuleNotFoundError: its package is not installed, or what that imports is not.
        """
        app, name, found = new_app(ExitCodes), self.entry.name, self.entry.load()
        if name not in OWN:
            found(app)
        elif isinstance(found, typer.Typer):
            app.add_typer(found, name=name, help=line_of(name))
        else:
            app.command(name, help=line_of(name))(found)
        group: Any = get_command(app)
        return group.commands[name]


class LazyGroup(ExitCodes):
    """The commands of all packages; each is loaded when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: LazyCommand(entry) for name, entry in entries().items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that the arguments name, loaded, and the arguments that are left."""
        name, command, rest = super().resolve_command(ctx, args)
        if not isinstance(command, LazyCommand):
            return name, command, rest
        try:
            return name, command.loaded(), rest
        except ModuleNotFoundError as error:
            raise _explained(error, command.entry) from error

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if a package that it imports is missing, say how to install it."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("gradbox"):
                raise
            command = self.commands[ctx.invoked_subcommand]
            assert isinstance(command, LazyCommand)  # as all of them are
            raise _explained(error, command.entry) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write every command with its line, by topic."""
        unlisted = self.commands.keys() - {name for lines in TOPICS.values() for name in lines}
        for topic, names in {**TOPICS, OTHER: sorted(unlisted)}.items():
            rows = [self._row(name) for name in names if name in self.commands]
            if rows:
                with formatter.section(topic):
                    formatter.write_dl(rows)

    def _row(self, name: str) -> tuple[str, str]:
        command = self.commands[name]
        assert isinstance(command, LazyCommand)  # as all of them are
        package = command.entry.module.partition(".")[0]
        _, needed = EXTRAS.get(package, ("", (package,)))
        missing = name not in CLIENT_ENOUGH and any(
            importlib.util.find_spec(module) is None for module in needed
        )
        line = f"(not installed: {how_to_install(package)})" if missing else command.help
        return styled(name, typer.colors.CYAN, stream=sys.stdout), line or ""


def gradbox() -> typer.Typer:
    """Return the app of the `gradbox` command."""
    app = new_app(LazyGroup, add_completion=True)
    app.callback(epilog=EPILOG)(_gradbox)
    return app


def how_to_install(package: str) -> str:
    """Say how to install what a package's commands need."""
    extra, _ = EXTRAS.get(package, ("", ()))
    return f"pip install 'gradbox[{extra}]'" if extra else f"install what {package} needs"


def version(*, json: AsJson = False) -> int:
    """Print the version."""
    from gradbox.protocol import PROTOCOL

    gradbox = metadata.version("gradbox")
    if json:
        say_json({"gradbox": gradbox, "protocol": PROTOCOL})
    else:
        say(f"gradbox {gradbox}, protocol {PROTOCOL}")
    return 0


def _say_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="say which gradbox")
]


def _gradbox(*, version: Version = False) -> None:
    """Gradients of large models, computed on a box that a team shares."""


def _explained(error: ModuleNotFoundError, entry: metadata.EntryPoint) -> typer.Exit:
    install = how_to_install(entry.module.partition(".")[0])
    complain(f"{entry.name} needs {error.name}, which is not installed: {install}")
    return typer.Exit(WRONG_USAGE)
