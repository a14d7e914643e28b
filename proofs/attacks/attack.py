"""What an attack is, and the table of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proofs.attacks.target import Target

Try = Callable[[Target], None]
"""Tries the attack; raises AssertionError where the box does not do what it must."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        tries: what is sent or done.
        must: what the box must do, and what must still be so afterwards.
        slow: takes more than a few seconds, or a box of its own.
        open: why it still gets through, while its defence is missing.
    """

    name: str
    tries: str
    must: str
    run: Try
    slow: bool = False
    open: str | None = None


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str, *, tries: str, must: str, slow: bool = False, open: str | None = None
) -> Callable[[Try], Try]:
    """Add the decorated function to the table."""

    def add(run: Try) -> Try:
        assert name not in ATTACKS, f"two attacks go by {name!r}"
        ATTACKS[name] = Attack(name, tries, must, run, slow, open)
        return run

    return add
