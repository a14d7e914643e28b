"""`gradbox runs list | show | save | delete | export`: training on the box."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gradbox.cli.completion import LOOKED_THROUGH, complete_run
from gradbox.cli.output import (
    SHOWN_LENGTH,
    AsJson,
    Everybodys,
    Limit,
    coloured,
    duration,
    say,
    say_view,
    say_views,
)
from gradbox.cli.result import NeededFile, check_folder
from gradbox.client import GradClient
from gradbox.errors import InvalidRequest, RunNotFound
from gradbox.protocol import RunView
from gradbox.runs import RunState, TrainRun

TITLES: Final = ("ID", "NAME", "MODEL", "OPTIMIZER", "STEPS", "LOSS", "LAST STEP", "SAVES")

commands: Final = typer.Typer(no_args_is_help=True)

_ARGUMENT: Final[dict[str, Any]] = {
    "metavar": "RUN",
    "help": "the run's id, its beginning, or its name",
    "autocompletion": complete_run,
}
Run = Annotated[str, typer.Argument(**_ARGUMENT)]
AtStep = Annotated[int | None, typer.Option("--step", metavar="N", help="as after that step")]


@commands.command("list", help="your runs, newest first")
def list_runs(
    *,
    everybodys: Everybodys = False,
    limit: Limit = 100,
    json: AsJson = False,
) -> int:
    """Print one line for each run."""
    with GradClient() as client:
        views = [run.view for run in client.runs(limit=limit, everybodys=everybodys)]
    return say_views(views, _row, titles=TITLES, what="runs", json=json)


@commands.command("show", help="one run, with what is saved of it")
def show_run(run: Run, *, json: AsJson = False) -> int:
    """Print all that the box says of a run."""
    with GradClient() as client:
        return say_view(find(client, run).view, json=json)


@commands.command("save", help="save a run's state under a name")
def save_run(
    run: Run,
    name: Annotated[str, typer.Argument(metavar="NAME", help="letters, digits, '.', '_', '-'")],
    *,
    step: AtStep = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="everybody with a token may read it")
    ] = False,
) -> int:
    """Save the newest state of a run, or that after a step."""
    with GradClient() as client:
        find(client, run).save(name, step=step, shared=shared)
    say(f"saved as {name}")
    return 0


@commands.command("delete", help="delete a run with its states, or one of its saves")
def delete_run(
    run: Run,
    *,
    save: Annotated[str | None, typer.Option(metavar="NAME", help="this save alone")] = None,
) -> int:
    """Delete a run, which must have no saves left, or one save."""
    with GradClient() as client:
        found = find(client, run)
        if save is None:
            found.delete()
        else:
            found.delete_save(save)
    say(f"{found.id} deleted" if save is None else f"{save} of {found.id} deleted")
    return 0


@commands.command("export", help="write a run's weights to a safetensors file")
def export_run(
    run: Annotated[str | None, typer.Argument(**_ARGUMENT)] = None,
    *,
    output: NeededFile,
    step: AtStep = None,
    save: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="as saved; without RUN, also what another user shares"),
    ] = None,
) -> int:
    """Write what the run trains, and the buffers, by their own names; an adapter's by peft's."""
    if step is not None and save is not None:
        raise typer.BadParameter("expected --step or --save, got both")
    if run is None and save is None:
        raise typer.BadParameter("expected RUN, or --save with the name of a saved state")
    if not check_folder(output):  # said now, and not when the weights are there
        return 2
    with GradClient() as client:
        weights = _state(client, run, step=step, save=save).weights()
        _write(weights, output)
    say(f"{output}: {len(weights)} tensors")
    return 0


def _state(
    client: GradClient, run: str | None, *, step: int | None, save: str | None
) -> TrainRun | RunState:
    if run is None:
        return client.saved(save or "")
    found = find(client, run)
    if save is not None:
        return found.saved(save)
    return found if step is None else found.at(step)


def find(client: GradClient, text: str) -> TrainRun:
    """Return the run of an id, of a name, or of an unambiguous beginning of an id.

    Raises:
        RunNotFound: there is none.
        InvalidRequest: several ids begin so.
    """
    try:
        return client.find_run(text)
    except RunNotFound:
        begun = [r for r in client.runs(limit=LOOKED_THROUGH) if text and r.id.startswith(text)]
        if len(begun) > 1:
            listed = "\n".join(f"{run.id}  {run.view.name}".rstrip() for run in begun)
            raise InvalidRequest(
                f"expected the id of one run, got {text!r}, with which {len(begun)} begin:\n"
                f"{listed}"
            ) from None
        if begun:
            return begun[0]
        raise


def _row(view: RunView) -> tuple[str, ...]:
    return (
        view.id[:SHOWN_LENGTH] if coloured(sys.stdout) else view.id,
        view.name,
        view.model,
        str(view.optimizer.get("name", "")),
        str(view.num_steps),
        "" if view.loss is None else f"{view.loss:.6g}",
        "" if view.last_step_s is None else duration(time.time() - view.last_step_s),
        ", ".join(save.name for save in view.saves),
    )


def _write(weights: dict[str, Any], path: Path) -> None:
    from gradbox.tensors.blob import Blob
    from gradbox.tensors.tensor_bytes import tensor_bytes
    from gradbox.written_files import beside

    blob = Blob({name: tensor_bytes(value, where=name) for name, value in weights.items()})
    with beside(path) as written, written.open("wb") as file:
        for chunk in blob.chunks():
            file.write(chunk)
