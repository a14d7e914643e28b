"""`gradbox models`: what a box offers, and the file that registers it.

`list`, `show` and `reload` ask the box, and need nothing but the client; `add` and `verify` work on
the models file, on the box's machine, and build models.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradbox.cli.completion import complete_model
from gradbox.cli.output import AsJson, complain, say, say_json, say_table
from gradbox.html import size

if TYPE_CHECKING:
    from gradbox.protocol import ModelView

ModelsFile = Annotated[Path, typer.Option(metavar="FILE", help="the models file")]
MODELS_FILE = Path("models.toml")
DONE, UNUSABLE, WRONG_USAGE = 0, 1, 2


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    group = typer.Typer(
        help="the models of a box, and the file that names them", no_args_is_help=True
    )
    for name, command, text in (
        ("list", list_models, "what the box offers, or with --models what a file names"),
        ("show", show_model, "one model: entry points, memory, and a job to begin with"),
        ("add", add_model, "try a model, and write its block into the models file"),
        ("verify", verify_models, "build every model of the file and compare it with what it was"),
        ("reload", reload_models, "have the box read its models file again; for its owner"),
    ):
        group.command(name, help=text)(command)
    app.add_typer(group, name="models")


def list_models(
    *,
    models: Annotated[
        Path | None, typer.Option(metavar="FILE", help="read this file instead of asking a box")
    ] = None,
    json: AsJson = False,
) -> int:
    """Print one line for each model; 2 if the file cannot be read."""
    if models is not None:
        return _list_file(models, json=json)
    from gradbox.client import GradClient

    with GradClient() as client:
        _say_models(client.models(), json=json)
    return DONE


def show_model(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="NAME or NAME@VERSION", autocompletion=complete_model),
    ],
    *,
    json: AsJson = False,
) -> int:
    """Print what the box says of a model, and a program that runs a job on it; 1 if unusable."""
    from gradbox.client import GradClient

    with GradClient() as client:
        view = client.model_info(name)
    if json:
        say_json(view.model_dump(mode="json") | {"example_code": view.example_code()})
    elif not view.usable:
        complain(f"{view.name} cannot be used: {view.reason}")
    else:
        say(f"# {view.name}@{view.version}")
        say(f"# {view.num_parameters:,} parameters, {size(view.size_bytes)} of weights")
        for method, call in view.methods.items():
            say(f"# {method}({', '.join(call.arguments)})")
        say(f"\n{view.example_code().rstrip()}")
    return DONE if view.usable else UNUSABLE


def reload_models(
    *,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="until every worker has read the file")
    ] = True,
    json: AsJson = False,
) -> int:
    """Have the workers read the models file again; 1 if one could not."""
    from gradbox.client import GradClient

    with GradClient() as client:
        found = client.reload_models(timeout_s=None if wait else 0.0)
    if json:
        say_json(found.model_dump(mode="json"), indent=2)
    else:
        _say_models(found.models, json=False)
        if found.reloading:
            say(f"after their jobs: {', '.join(found.reloading)}")
    for worker, error in found.errors.items():
        complain(f"{worker} serves what it did before: {error}")
    return UNUSABLE if found.errors else DONE


def add_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="what jobs will call it")],
    *,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="a folder, a name of the Hugging Face hub, FILE.py:FUNCTION, PACKAGE:FUNCTION, or "
            "with --builder an architecture",
        ),
    ],
    builder: Annotated[
        str | None, typer.Option(help="hf | python | timm | torchvision [hf, or python for A:B]")
    ] = None,
    kwarg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="what the builder is given")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a safetensors file of all its tensors")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="an entry point [forward]")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="where there is a block of this name")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="have the running box offer it at once")
    ] = False,
    models: ModelsFile = MODELS_FILE,
    json: AsJson = False,
) -> int:
    """Build a model, try it, and register it; 1 if it cannot be served, and nothing is written."""
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models.register import entry_of, holds, new_table, write_table
    from gradbox_worker.models.verify import verify_model

    try:
        if holds(models, name) and not replace:
            return _wrong(f"{models} has a model {name!r}: choose another name, or --replace it")
        table = new_table(
            source,
            models=models,
            builder=builder,
            kwargs=kwarg or (),
            weights=weights,
            methods=method or (),
        )
        verdict = verify_model(entry_of(models, name, table))
        if verdict.found is not None:
            write_table(models, name, {**table, "registered": vars(verdict.found)})
    except (ModelsFileError, OSError) as error:
        return _wrong(str(error))
    if json:
        say_json(verdict.as_dict(), indent=2)
    else:
        say("\n".join(verdict.lines()))
    if verdict.found is None:
        return UNUSABLE
    print(f"written to {models}; `gradbox models reload` has a box offer it", file=sys.stderr)
    return reload_models(json=json) if reload else DONE


def verify_models(
    *,
    models: ModelsFile = MODELS_FILE,
    accept: Annotated[
        bool, typer.Option("--accept", help="write what they are now as what they are to be")
    ] = False,
    json: AsJson = False,
) -> int:
    """Build the models twice and print what came of each.

    Returns:
        0 if all can be served and are what was registered, 1 if not, 2 if the file cannot be read.
    """
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(models)
    except ModelsFileError as error:
        return _wrong(str(error))
    from gradbox_worker.models.register import note_registered
    from gradbox_worker.models.verify import verify_model

    verdicts = [verify_model(entry) for entry in entries.values()]
    if json:
        say_json([verdict.as_dict() for verdict in verdicts], indent=2)
    else:
        say("\n".join(line for verdict in verdicts for line in verdict.lines()))
    if accept:
        note_registered(models, {v.name: v.found for v in verdicts if v.found is not None})
        return DONE if all(verdict.found for verdict in verdicts) else UNUSABLE
    return DONE if all(verdict.problem is None for verdict in verdicts) else UNUSABLE


def _list_file(models: Path, *, json: bool) -> int:
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(models)
    except ModelsFileError as error:
        return _wrong(str(error))
    rows = [
        {
            "name": entry.name,
            "builder": entry.builder,
            "source": entry.source,
            "weights": None if entry.weights is None else str(entry.weights),
            "methods": list(entry.methods),
        }
        for entry in entries.values()
    ]
    if json:
        say_json(rows, indent=2)
        return DONE
    for row in rows:
        weights = f", weights {row['weights']}" if row["weights"] else ""
        say(f"{row['name']}: {row['builder']} {row['source']}{weights}")
    return DONE


def _say_models(views: list[ModelView], *, json: bool) -> None:
    if json:
        say_json([view.model_dump(mode="json") for view in views], indent=2)
    else:
        say_table([("NAME", "PARAMETERS", "MEMORY", "VERSION", "STATE"), *map(_row, views)])


def _row(view: ModelView) -> tuple[str, ...]:
    if not view.usable:
        return (view.name, "", "", "", f"not usable: {view.reason}")
    memory = size(view.size_bytes)
    return (view.name, f"{view.num_parameters:,}", memory, view.version[:12], "usable")


def _wrong(text: str) -> int:
    complain(f"models: {text}")
    return WRONG_USAGE
