"""The metadata of a factored result: which tensors of the file make which parameter's term.

`docs/wire.md`, "Factored arrays", states the form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from gradbox.errors import ProtocolError

if TYPE_CHECKING:
    import torch

    from gradbox_factors import Factored, Term

FACTORS: Final = "gradbox_factors"


class Piece(Mapping[str, Any]):
    """The terms of one shard, each built when it is first used."""

    def __init__(
        self, described: list[dict[str, Any]], factor: Callable[[str], torch.Tensor]
    ) -> None:
        self._described = {given["parameter"]: given for given in described}
        self._factor = factor
        self._built: dict[str, Term] = {}

    def __getitem__(self, name: str) -> Term:
        from gradbox_factors import TERMS

        if name not in self._built:
            given = self._described[name]
            tensors = {own: self._factor(place) for own, place in given["tensors"].items()}
            shape = tuple(given["shape"])
            kind = TERMS[given["rule"]]
            self._built[name] = kind.read(name, shape, given["geometry"], tensors)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape."""
        return tuple(self._described[name]["shape"])


def read_factors(text: str, tensor: Callable[[str], torch.Tensor]) -> Factored:
    """Return the terms that the metadata describes.

    Args:
        text: the metadata's entry.
        tensor: gives a tensor of the file by its name; what two terms share is asked for once.

    Raises:
        ProtocolError: the metadata names a rule that this version does not know, or is not whole.
    """
    from gradbox_factors import TERMS, Factored

    read: dict[str, torch.Tensor] = {}

    def factor(name: str) -> torch.Tensor:
        if name not in read:
            read[name] = tensor(name)
        return read[name]

    try:
        described = json.loads(text)["pieces"]
        rules = {given["rule"] for piece in described for given in piece}
        pieces = [Piece(piece, factor) for piece in described]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"expected factors as docs/wire.md states them, got some that cannot be read "
            f"({type(error).__name__}: {error})"
        ) from None
    unknown = sorted(rules - TERMS.keys())
    if unknown:
        raise ProtocolError(
            f"expected factors of the rules {', '.join(TERMS)}, got {', '.join(unknown)}; this "
            f"client is older than the box: install a newer one"
        )
    return Factored(pieces)
