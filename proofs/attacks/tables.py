"""All tables of attacks, filled in the order in which `--list` shows them."""

from __future__ import annotations

from proofs.attacks import (  # noqa: F401  # each adds its attacks
    files,
    graphs,
    limits,
    owners,
    processes,
    records,
    requests,
    results,
    smuggling,
    storage,
    strings,
)
from proofs.attacks.attack import ATTACKS, Attack

__all__ = ["ATTACKS", "Attack"]
