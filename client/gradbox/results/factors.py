"""The factors of a result: read from its metadata, and checked before any of them is used.

The file is what a box sent, or what somebody stored. Its metadata says which tensors make which
parameter's term (docs/wire.md, "Factored arrays"); their shapes, as the file's header states them,
are held against the rules of that page. So a file that lies is refused with a sentence instead of
an error of some kernel, or a number that means nothing.

Shapes: B samples, Y outputs, S the parameter's shape; the others as docs/wire.md has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from gradbox.errors import ProtocolError

if TYPE_CHECKING:
    import torch

    from gradbox_factors import Factored, Term

FLOATS: Final = ("F64", "F32", "F16", "BF16")
INDICES: Final = ("I64",)
# A total of totals of totals says nothing that a total does not.
MAX_DEPTH: Final = 4

Shape = tuple[int, ...]
RowSizes = tuple[int, int]
"""B and Y of a term."""

Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, as its header has it."""

    dtype: str
    shape: Shape


class DescribedTerm(BaseModel):
    """One entry of the metadata: a parameter's term, and where its tensors are in the file."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    parameter: str
    shape: tuple[Natural, ...]
    rule: str
    geometry: dict[str, Any]
    tensors: dict[str, str]


class ConvolutionGeometry(BaseModel):
    """The geometry of the rule `convolution`: one number a spatial dim."""

    model_config = ConfigDict(defer_build=True)

    kernel: tuple[Positive, ...]
    stride: tuple[Positive, ...]
    padding: tuple[Natural, ...]
    dilation: tuple[Positive, ...]
    groups: Positive
    transposed: StrictBool


def check_term(term: DescribedTerm, stored: Mapping[str, StoredTensor]) -> RowSizes:
    """Return B and Y of a term.

    Args:
        stored: the tensors of the file by their names there.

    Raises:
        ProtocolError: a tensor is missing, or has another dtype or shape than the rule asks for.
    """
    where = f"the factors of {term.parameter!r} (rule {term.rule})"
    missing = sorted(name for name in term.tensors.values() if name not in stored)
    if missing:
        raise ProtocolError(f"{where}: expected the tensors {missing} in the file, got none")
    factors = {own: stored[name] for own, name in term.tensors.items()}
    try:
        return _sizes(term.rule, _Term(term.shape, term.geometry, factors), depth=1)
    except (_Misfit, ValidationError) as error:
        raise ProtocolError(
            f"{where} do not fit a parameter of shape {term.shape}: {error}; fetch the result "
            f"again, and if that fails too, tell the box's owner"
        ) from None


class _Misfit(ValueError):
    """A factor that the rule does not allow."""


# The dims of each rule's factors, as docs/wire.md has them: one letter is one size within a term.
# Behind those of a convolution come spatial ones, and behind those of a block the parameter's.
_DIMS: Final[Mapping[str, Mapping[str, str]]] = {
    "outer": {"left": "YBTO", "right": "BTI"},
    "positions": {"left": "YBTO"},
    "lookup": {"left": "YBTD", "ids": "BT"},
    "convolution": {"left": "YBMO", "right": "BMC"},
    "block": {"array": "BY"},
    "zero": {"empty": "BYN"},
}


@dataclass(frozen=True)
class _Term:
    shape: Shape
    geometry: Mapping[str, Any]
    factors: Mapping[str, StoredTensor]

    def sizes(self, rule: str) -> tuple[dict[str, int], dict[str, Shape]]:
        """Return the size of each letter, and of each factor the dims behind its letters."""
        sizes: dict[str, int] = {}
        behind: dict[str, Shape] = {}
        for name, dims in _DIMS[rule].items():
            found = self.factors.get(name)
            _expect(found is not None, f"it has no tensor {name!r}")
            assert found is not None
            dtypes = INDICES if name == "ids" else FLOATS
            _expect(found.dtype in dtypes, f"{name} is {found.dtype}, expected {list(dtypes)}")
            known = zip(dims, found.shape, strict=False)
            fits = all(sizes.setdefault(letter, size) == size for letter, size in known)
            more = len(found.shape) - len(dims)
            fits = fits and (more == 0 or (more > 0 and rule in ("convolution", "block")))
            _expect(fits, f"{name} has shape {found.shape}, expected ({dims}) with {sizes}")
            behind[name] = found.shape[len(dims) :]
        return sizes, behind

    def flag(self, name: str) -> bool:
        found = self.geometry.get(name)
        _expect(isinstance(found, bool), f"{name} is neither true nor false")
        return bool(found)


def _sizes(rule: str, term: _Term, *, depth: int) -> RowSizes:
    if rule == "total":
        return _total(term, depth=depth)
    _expect(rule in _DIMS, f"there is no rule {rule!r}")
    size, behind = term.sizes(rule)
    matrix = (term.shape[0] if term.shape else 0, prod(term.shape[1:]))
    match rule:
        case "outer":
            made = (size["I"], size["O"]) if term.flag("transposed") else (size["O"], size["I"])
            fits = made == matrix
        case "positions":
            fits = (size["T" if term.flag("channels_first") else "O"], 1) == matrix
        case "lookup":
            fits = term.shape[1:] == (size["D"],)
        case "block":
            fits = behind["array"] == term.shape
        case "zero":
            fits = size["N"] == 0
        case _:
            _check_convolution(term, size, image=behind["right"], out=behind["left"])
            fits = True
    found = {name: factor.shape for name, factor in term.factors.items()}
    _expect(fits, f"that is not what {found} make")
    return size["B"], size["Y"]


def _check_convolution(term: _Term, size: Mapping[str, int], *, image: Shape, out: Shape) -> None:
    walk = ConvolutionGeometry.model_validate(term.geometry)
    each_dim = (walk.kernel, walk.stride, walk.padding, walk.dilation)
    lengths = {*map(len, each_dim), len(image), len(out)}
    _expect(
        len(lengths) == 1 and lengths <= {1, 2, 3},
        "kernel, stride, padding and dilation, or its images, have not 1 to 3 dims all alike",
    )
    first, second = (size["C"], size["O"]) if walk.transposed else (size["O"], size["C"])
    _expect(first % walk.groups == second % walk.groups == 0, f"not {walk.groups} equal groups")
    expected = (first, second // walk.groups, *walk.kernel)
    _expect(term.shape == expected, f"its tensors are those of shape {expected}")
    image, steps = (out, image) if walk.transposed else (image, out)
    counted = tuple(_steps(*sizes) for sizes in zip(image, *each_dim, strict=True))
    # A transposed one may leave the last steps of its walk without numbers.
    fits = all(map(int.__le__, steps, counted)) if walk.transposed else steps == counted
    _expect(fits, f"a walk over {image} has {counted} steps, and there are {steps}")


def _steps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _total(term: _Term, *, depth: int) -> RowSizes:
    parts = term.geometry.get("terms")
    _expect(isinstance(parts, list) and bool(parts), "a total has a list of terms")
    _expect(depth < MAX_DEPTH, f"it is nested more than {MAX_DEPTH} deep")
    found = set()
    for index, part in enumerate(parts or []):
        _expect(isinstance(part, dict), "a total's terms are objects")
        own = {
            name.partition(".")[2]: tensor
            for name, tensor in term.factors.items()
            if name.partition(".")[0] == str(index)
        }
        rule = str(part.get("rule"))
        found.add(_sizes(rule, _Term(term.shape, part, own), depth=depth + 1))
    _expect(len(found) == 1, f"its terms have different B and Y: {sorted(found)}")
    return found.pop()


def _expect(fits: bool, why: str) -> None:
    if not fits:
        raise _Misfit(why)


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
