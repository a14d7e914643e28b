"""Text of somebody else's making, made fit for a terminal or a log.

Job names, problem details, model names and owners come over the wire. An escape sequence in one
could rewrite a terminal's lines, a direction mark could reorder them, a line break could forge a
line of a log.
"""

from __future__ import annotations


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return `str(text)` with every character that does not print written as an escape.

    What comes out is unchanged by a second call, so text may be escaped where it is made and again
    where it is shown.

    Args:
        lines: keep line breaks and tabs, for messages of several lines.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        character
        if character.isprintable() or character in kept
        else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )
