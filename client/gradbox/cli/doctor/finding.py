"""What one check of `gradbox doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        check: its name.
        state: "skipped" where what it looks at is not there, and need not be.
        says: what was found.
        fix: what to do about it; empty if nothing is wrong.
    """

    check: str
    state: Literal["ok", "problem", "skipped"]
    says: str
    fix: str = ""


def fine(check: str, says: str) -> Finding:
    """Return that nothing is wrong."""
    return Finding(check=check, state="ok", says=says)


def skipped(check: str, says: str) -> Finding:
    """Return that there was nothing to look at."""
    return Finding(check=check, state="skipped", says=says)


def problem(check: str, says: str, *, fix: str) -> Finding:
    """Return what is wrong, and what to do."""
    return Finding(check=check, state="problem", says=says, fix=fix)
