"""The ids of rows, whole numbers or texts, as two tensors hold them; each comes once in a store.

samples/ids       int64 (B,)
samples/id_bytes  uint8, all texts in UTF-8 one after the other, with
samples/id_ends   int64 (B,), behind which byte each of them ends
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import safe_open

from gradbox.errors import InvalidInputs

Ids = Sequence[int] | Sequence[str]
NUMBERS: Final = "samples/ids"
TEXTS, ENDS = "samples/id_bytes", "samples/id_ends"
SHOWN: Final = 3


def ids_of(numbers: Any, ends: Any = None) -> Ids:
    """Return the ids that arrays hold.

    Args:
        numbers: the ids themselves, or the bytes of texts.
        ends: of texts.

    Raises:
        InvalidInputs: they hold none.
    """
    if ends is None:
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            raise InvalidInputs(f"ids: expected int64 (B,), got {_described(numbers)}")
        whole_numbers: list[int] = numbers.tolist()
        return whole_numbers
    if numbers.dtype != np.uint8 or numbers.ndim != 1 or ends.dtype != np.int64 or ends.ndim != 1:
        raise InvalidInputs(
            f"ids: expected uint8 (N,) and ends int64 (B,), got {_described(numbers)} and "
            f"{_described(ends)}"
        )
    places = [0, *ends.tolist()]
    if places != sorted(places) or places[-1] != len(numbers):
        raise InvalidInputs(f"id_ends: expected rising numbers up to {len(numbers)}, got others")
    whole = numbers.tobytes()
    try:
        return [whole[first:last].decode() for first, last in pairwise(places)]
    except UnicodeDecodeError:
        raise InvalidInputs("ids: expected UTF-8, got other bytes") from None


def read_ids(part: Path) -> Ids:
    """Return the ids of a part's rows."""
    with safe_open(part, framework="np") as file:
        if NUMBERS in file.keys():  # noqa: SIM118  # the file is no dict
            return ids_of(file.get_tensor(NUMBERS))
        return ids_of(file.get_tensor(TEXTS), file.get_tensor(ENDS))


def check_new(ids: Ids, parts: Iterable[Path]) -> None:
    """Check that rows are not in a store yet, and come once.

    Args:
        parts: the files of the store.

    Raises:
        InvalidInputs: an id comes twice, or is of another type than those of the store.
    """
    new = set(ids)
    if len(new) < len(ids):
        twice = [one for one, times in Counter(ids).items() if times > 1]
        raise InvalidInputs(f"ids: expected each once, got {_some(twice)} more than once")
    for part in parts:
        there = read_ids(part)
        if there and ids and type(there[0]) is not type(ids[0]):
            raise InvalidInputs(
                f"ids: expected {type(there[0]).__name__}, as the store's are, got "
                f"{type(ids[0]).__name__}"
            )
        again = new.intersection(there)
        if again:
            raise InvalidInputs(
                f"ids: expected rows that the store lacks, got {_some(sorted(again))} again; "
                f"leave out what is there (store.ids())"
            )


def _some(ids: Sequence[Any]) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"{', '.join(repr(one) for one in ids[:SHOWN])}{more}"


def _described(array: Any) -> str:
    return f"{array.dtype} {array.shape}"
