"""`gradbox models`: what the models file names, and whether it can be built."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "models", help="list or verify the models of a models file"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _action(actions, "list", help="what the file names; builds nothing", run=list_models)
    _action(
        actions,
        "verify",
        help="build every model twice and say its version, its size and what is wrong",
        run=verify_models,
    )


def _action(actions: Any, name: str, *, help: str, run: Callable[[Any], int]) -> None:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help)
    parser.add_argument(
        "--models", type=Path, default=Path("models.toml"), help="the models file [models.toml]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def list_models(args: argparse.Namespace) -> int:
    """Print the entries of the models file; 2 if it cannot be read."""
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(args.models)
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
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        weights = f", weights {row['weights']}" if row["weights"] else ""
        print(f"{row['name']}: {row['builder']} {row['source']}{weights}")
    return 0


def verify_models(args: argparse.Namespace) -> int:
    """Build the models and print what came of each.

    Returns:
        0 if all can be served, 1 if one cannot, 2 if the file cannot be read.
    """
    from gradbox_worker.errors import ModelsFileError
    from gradbox_worker.models import read_models_file

    try:
        entries = read_models_file(args.models)
    except ModelsFileError as error:
        print(f"gradbox models: {error}", file=sys.stderr)
        return 2
    from gradbox_worker.models.verify import verify_model

    rows = [verify_model(entry) for entry in entries.values()]
    if args.json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        for row in rows:
            print(row)
    return 0 if all(row.problem is None for row in rows) else 1
