"""The metadata of a factored result: which tensors of the file make which parameter's term.

`docs/wire.md`, "Factored arrays", states the form; `factor_checks` holds a file to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gradbox.errors import ProtocolError
from gradbox.results.factor_checks import DescribedTerm, StoredTensor, check_term

if TYPE_CHECKING:
    import torch

    from gradbox_factors import Factored, Term

FACTORS: Final = "gradbox_factors"


class DescribedFactors(BaseModel):
    """The metadata's entry: for each shard the terms of all parameters, in one order."""

    model_config = ConfigDict(defer_build=True)

    pieces: tuple[tuple[DescribedTerm, ...], ...]


class Piece(Mapping[str, Any]):
    """The terms of one shard, each built when it is first used."""

    def __init__(
        self, described: Sequence[DescribedTerm], factor: Callable[[str], torch.Tensor]
    ) -> None:
        self._described = {given.parameter: given for given in described}
        self._factor = factor
        self._built: dict[str, Term] = {}

    def __getitem__(self, name: str) -> Term:
        from gradbox_factors import TERMS

        if name not in self._built:
            given = self._described[name]
            tensors = {own: self._factor(stored) for own, stored in given.tensors.items()}
            _check_ids(given, tensors)
            kind = TERMS[given.rule]
            self._built[name] = kind.read(name, given.shape, given.geometry, tensors)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a parameter's shape."""
        return self._described[name].shape


def read_factors(
    text: str,
    tensor: Callable[[str], torch.Tensor],
    *,
    stored: Mapping[str, StoredTensor],
    names: Sequence[str],
    samples: int | None,
    outputs: int | None,
) -> Factored:
    """Return the terms that the metadata describes.

    Args:
        text: the metadata's entry.
        tensor: gives a tensor of the file by its name; what two terms share is asked for once.
        stored: what the file's header says of its tensors.
        names, samples, outputs: what the receipt says of the rows: their parameters, B and Y.

    Raises:
        ProtocolError: the metadata is not what docs/wire.md states, names a rule that this version
            does not know, or does not agree with the file's tensors or the receipt. Indices out of
            range raise it when their term is first used.
    """
    from gradbox_factors import Factored

    read: dict[str, torch.Tensor] = {}

    def factor(name: str) -> torch.Tensor:
        if name not in read:
            read[name] = tensor(name)
        return read[name]

    try:
        described = DescribedFactors.model_validate_json(text).pieces
    except ValidationError as error:
        raise ProtocolError(
            f"expected factors as docs/wire.md states them, got some that cannot be read ({error})"
        ) from None
    _check_rules(described)
    found = 0
    for piece in described:
        if [term.parameter for term in piece] != list(names) or not piece:
            raise ProtocolError(
                f"expected factors of the receipt's {len(names)} parameters in every piece, in "
                f"their order, got {[term.parameter for term in piece][:5]} …"
            )
        sizes = {check_term(term, stored) for term in piece}
        if len(sizes) > 1 or {y for _, y in sizes} != {outputs or 1}:
            raise ProtocolError(
                f"expected factors of the receipt's {outputs or 1} outputs and of one number of "
                f"samples in a piece, got (samples, outputs) {sorted(sizes)}"
            )
        found += next(iter(sizes))[0]
    if not described or (samples is not None and found != samples):
        raise ProtocolError(f"expected factors of the receipt's {samples} samples, got {found}")
    return Factored([Piece(piece, factor) for piece in described])


def _check_rules(described: Sequence[Sequence[DescribedTerm]]) -> None:
    from gradbox_factors import TERMS

    unknown = sorted({term.rule for piece in described for term in piece} - TERMS.keys())
    if unknown:
        raise ProtocolError(
            f"expected factors of the rules {', '.join(TERMS)}, got {', '.join(unknown)}; this "
            f"client is older than the box: install a newer one"
        )


def _check_ids(term: DescribedTerm, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse indices of rows that the parameter does not have.

    Raises:
        ProtocolError: one is below 0, or not below the parameter's first size.
    """
    for own, ids in tensors.items():
        if own.rpartition(".")[2] == "ids" and ids.numel():
            lowest, highest = (int(end) for end in ids.aminmax())
            if lowest < 0 or highest >= term.shape[0]:
                raise ProtocolError(
                    f"expected ids from 0 to {term.shape[0] - 1} in the factors of "
                    f"{term.parameter!r}, got {lowest} to {highest}; fetch the result again"
                )
