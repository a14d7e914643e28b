"""The reference in docs/cli.md, made from the commands: `python -m tests.house.cli_reference`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from gradbox.cli.commands import TOPICS, LazyCommand, entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BEGIN = "<!-- From here on made by `python -m tests.house.cli_reference`. -->\n"


def reference() -> str:
    """Return a section for every command, by topic as `gradbox --help` has them."""
    found = entries()
    return "\n".join(
        line
        for topic, names in TOPICS.items()
        for line in (
            f"## {topic}\n",
            *(part for name in names for part in _sections(name, _loaded(found[name]))),
        )
    )


def _loaded(entry: Any) -> Any:
    return LazyCommand(entry).loaded()


def _sections(path: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=f"gradbox {path}")
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        arguments = [_usage(p) for p in command.params if p.param_type_name == "argument"]
        yield f"### gradbox {' '.join([path, *arguments])}\n"
        yield f"{_sentence(command.help)}\n"
        rows = [p.get_help_record(context) for p in command.params]
        options = [
            f"| `{record[0].replace('|', '/')}` | {record[1].replace('|', '/')} |"
            for param, record in zip(command.params, rows, strict=True)
            if param.param_type_name == "option" and record is not None
        ]
        if options:
            yield "\n".join(["| option | what |", "|---|---|", *options]) + "\n"
    for name, below in inner.items():
        yield from _sections(f"{path} {name}", below)


def _usage(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    written, _, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{written}{BEGIN}\n{reference()}")
