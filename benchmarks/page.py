"""Pieces of a report's Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MIB = 2**20


def section(title: str, *blocks: str | Iterable[str]) -> str:
    """Return a section: each block is a paragraph, or lines such as a table's."""
    texts = (block if isinstance(block, str) else "\n".join(block) for block in blocks)
    return "\n\n".join([f"## {title}", *texts])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines, the first column to the left and the others to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|---|" + "--:|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines


def verdict(met: bool, sentence: str) -> str:
    """Return whether a bar is met, and the sentence that states it."""
    return f"{'met' if met else '**not met**'}: {sentence}"


def verdicts(bars: Iterable[tuple[bool, str]]) -> list[str]:
    """Return a list of bars, each with whether it is met."""
    return [f"- {verdict(met, sentence)}" for met, sentence in bars]


def mebibytes(num_bytes: float | None) -> str:
    """Return bytes as MiB; None is a process that did not live to say it."""
    return "died" if num_bytes is None else f"{num_bytes / MIB:.0f}"
