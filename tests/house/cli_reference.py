"""The reference in docs/cli.md, made from the commands: `python -m tests.house.cli_reference`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradbox.cli.commands import TOPICS, LazyCommand, entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BEGIN = "<!-- From here on made by `python -m tests.house.cli_reference`. -->\n"


def reference() -> str:
    """Return a table of the commands for every topic of `gradbox --help`."""
    found = entries()
    return "\n".join(
        line
        for topic, names in TOPICS.items()
        for line in (
            f"## {topic}\n\n| command | what it does |\n|---|---|",
            *(row for name in names for row in _rows(name, _loaded(found[name]))),
            "",
        )
    )


def _loaded(entry: Any) -> Any:
    return LazyCommand(entry).loaded()


def _rows(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        arguments = [_usage(p) for p in command.params if p.param_type_name == "argument"]
        yield f"| `gradbox {' '.join([path, *arguments])}` | {_sentence(command.help)} |"
    for name, below in inner.items():
        yield from _rows(f"{path} {name}", below)


def _usage(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    written, _, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{written}{BEGIN}\n{reference()}")
