"""Commands of other packages, found by entry points."""

from __future__ import annotations

import argparse
from importlib import metadata
from typing import Any, Final

from gradbox.cli.output import complain

GROUP: Final = "gradbox.commands"
# Which extra brings what a package of this distribution imports.
EXTRAS: Final = {"gradbox_service": "service", "gradbox_worker": "worker"}


def register(subparsers: Any, *, chosen: str | None) -> None:
    """Add every command that joined.

    Args:
        chosen: the command that is called: only that one is loaded. None loads all of them, for
            their lines of help.
    """
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        if chosen not in (None, entry.name):
            subparsers.add_parser(entry.name)
            continue
        try:
            add = entry.load()
        except ModuleNotFoundError as error:
            _register_missing(subparsers, entry, error)
        else:
            add(subparsers)


def how_to_install(module: str) -> str:
    """Say how to install what a command's module needs."""
    package = module.partition(".")[0]
    extra = EXTRAS.get(package)
    return f"pip install 'gradbox[{extra}]'" if extra else f"install what {package} needs"


def _register_missing(
    subparsers: Any, entry: metadata.EntryPoint, error: ModuleNotFoundError
) -> None:
    install = how_to_install(entry.module)

    def explain(args: argparse.Namespace) -> int:
        complain(f"{entry.name} needs {error.name}, which is not installed: {install}")
        return 2

    # No character begins an option here, so that whatever follows is taken and explained.
    parser: argparse.ArgumentParser = subparsers.add_parser(
        entry.name, help=f"(not installed: {install})", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("rest", nargs="*")
    parser.set_defaults(func=explain)
