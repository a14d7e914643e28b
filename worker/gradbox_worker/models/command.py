"""`gradbox models`: what the models file names, and whether it can be built."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradbox.cli.output import AsJson

ModelsFile = Annotated[Path, typer.Option(metavar="FILE", help="the models file")]
MODELS_FILE = Path("models.toml")


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    group = typer.Typer(help="list or verify the models of a models file", no_args_is_help=True)
    group.command("list", help="what the file names; builds nothing")(list_models)
    group.command(
        "verify", help="build every model twice and say its version, its size and what is wrong"
    )(verify_models)
    app.add_typer(group, name="models")


def list_models(*, models: ModelsFile = MODELS_FILE, json: AsJson = False) -> int:
    """Print the entries of the models file; 2 if it cannot be read."""
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(models)
    except ModelsFileError as error:
        print(f"gradbox models: {error}", file=sys.stderr)
        return 2
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
        print(jsons.dumps(rows, indent=2))
        return 0
    for row in rows:
        weights = f", weights {row['weights']}" if row["weights"] else ""
        print(f"{row['name']}: {row['builder']} {row['source']}{weights}")
    return 0


def verify_models(*, models: ModelsFile = MODELS_FILE, json: AsJson = False) -> int:
    """Build the models and print what came of each.

    Returns:
        0 if all can be served, 1 if one cannot, 2 if the file cannot be read.
    """
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(models)
    except ModelsFileError as error:
        print(f"gradbox models: {error}", file=sys.stderr)
        return 2
    from gradbox_worker.models.verify import verify_model

    rows = [verify_model(entry) for entry in entries.values()]
    if json:
        print(jsons.dumps([row.as_dict() for row in rows], indent=2))
    else:
        for row in rows:
            print(row)
    return 0 if all(row.problem is None for row in rows) else 1
