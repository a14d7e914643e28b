"""The shapes of what losses are given: those that torch would broadcast to another loss, silently.

Each check is an `if` that raises, so that it is recorded as a check where the loss is traced.
"""

from __future__ import annotations

from torch import Tensor


def check_one_each(name: str, given: Tensor, z: Tensor) -> None:
    """Raises:
    ValueError: it has not one entry for each sample.
    """
    if given.shape != z.shape[:1]:
        raise ValueError(
            f"{name}: expected shape {tuple(z.shape[:1])}, one entry for each of the outputs of "
            f"shape {tuple(z.shape)}, got {tuple(given.shape)}"
        )


def check_alike(name: str, given: Tensor, z: Tensor) -> None:
    """Raises:
    ValueError: it has another shape than z.
    """
    if given.shape != z.shape:
        raise ValueError(f"{name}: expected shape {tuple(z.shape)}, got {tuple(given.shape)}")


def check_scalar(name: str, given: Tensor) -> None:
    """Raises:
    ValueError: it is not one number.
    """
    if given.numel() != 1:
        raise ValueError(f"{name}: expected one number, got shape {tuple(given.shape)}")


def pairs(left: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both members of each pair; one tensor holds them in two halves."""
    if right is not None:
        return left, right
    halves = left.reshape(2, -1, left.shape[1])
    return halves[0], halves[1]
