"""Pieces of a report's Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines, the first column to the left and the others to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|---|" + "--:|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines


def verdict(met: bool, sentence: str) -> str:
    """Return whether a bar is met, and the sentence that states it."""
    return f"{'met' if met else '**not met**'}: {sentence}"


def mebibytes(num_bytes: float | None) -> str:
    """Return bytes as MiB; None is a process that did not live to say it."""
    return "died" if num_bytes is None else f"{num_bytes / MIB:.0f}"
