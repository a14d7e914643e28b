"""Curvature of per-sample gradients as `TwoSided` projects them, by layers.

With its bias as one more column, a layer's gradient of sample b is M_b = Σ_t g_bt a_btᵀ, of output
gradients and inputs at T positions. Its block of the empirical Fisher H = 1/B Σ_b vec M_b vec M_bᵀ
is taken as

    K-FAC    G ⊗ A,  G = 1/B Σ_bt g gᵀ,  A = 1/(B T) Σ_bt a aᵀ
    EK-FAC   U diag(Λ) Uᵀ,  U the eigenvectors of G ⊗ A,  Λ = 1/B Σ_b (U_Gᵀ M_b U_A)²

Projected rows have the factors QᵀGQ and PᵀAP. A bias joins its layer's weight, but for one of a
product with a transposed weight, whose columns are other ones: it is a layer with the input 1.

Sources: Martens and Grosse 2015, arXiv:1503.05671; Grosse and Martens 2016, arXiv:1602.01407 (sums
over positions); George et al. 2018, arXiv:1806.03884 (EK-FAC); Grosse et al. 2023, arXiv:2308.03296
(on influence).
Cost: a pass over the samples with T (r² + c²) multiplications a layer of r × c numbers, and its
eigenvectors in float64; for EK-FAC one more pass.
Limits: padded positions count in A. Embeddings and what is tied to them, norms, grouped and
transposed convolutions, and what takes one backward pass a sample, have no factors.

Shapes: B samples, K numbers a row, r and c of a layer, n samples and positions together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.per_sample.api import collect
from gradbox_engine.per_sample.reductions import SampleSums, Terms
from gradbox_engine.per_sample.request import SampleResult
from gradbox_engine.requests import Shard
from gradbox_factors import Outer, Positions, Term, TwoSided, projected_rows

DAMPING: Final = 0.1  # of a block's mean eigenvalue: kronfluence's with `damping_factor=None`


@dataclass(frozen=True)
class EigenBlock:
    """H on r × c numbers of a row: (U_r ⊗ U_c) diag(Λ) (U_r ⊗ U_c)ᵀ.

    Attributes:
        index: which numbers of a row, (r, c), int64.
        left: U_r, (r, r).
        right: U_c, (c, c).
        values: Λ, (r, c).
    """

    index: Tensor
    left: Tensor
    right: Tensor
    values: Tensor

    @classmethod
    def of_factors(cls, index: Tensor, left: Tensor, right: Tensor) -> EigenBlock:
        """Return the block whose H is left ⊗ right, both symmetric."""
        (of_left, U_r), (of_right, U_c) = map(torch.linalg.eigh, (left.double(), right.double()))
        values = of_left.clamp_min(0)[:, None] * of_right.clamp_min(0)
        return cls(index.to(left.device), U_r, U_c, values)

    def rotated(self, rows_BK: Tensor) -> Tensor:
        """Return the block's numbers of rows in its eigenvectors, (B, r, c)."""
        return _between(self.left, rows_BK[:, self.index], self.right)

    def solve(self, rows_BK: Tensor, out_BK: Tensor, *, damping: float | None) -> None:
        """Write (H + λ)⁻¹ times the block's numbers of rows to their places in `out`.

        Args:
            damping: λ, by default `DAMPING` times the mean of Λ. Where that is 0, `out` stays.
        """
        added = DAMPING * float(self.values.mean()) if damping is None else damping
        if not added:
            return
        rotated = self.rotated(rows_BK) / (self.values + added).to(rows_BK.dtype)
        out_BK[:, self.index] = _between(self.left.T, rotated, self.right.T)


@dataclass(frozen=True)
class Curvature:
    """The blocks of H by their layers' parameters, and the parameters that none is of."""

    blocks: Mapping[tuple[str, ...], EigenBlock]
    left_out: tuple[str, ...]
    found: SampleResult


def kronecker(
    model: nn.Module,
    inputs: Sequence[Shard],
    loss: Callable[..., Tensor],
    projection: TwoSided,
    *,
    corrected: bool,
    **given: Any,
) -> Curvature:
    """Return K-FAC's curvature of the samples' projected gradients, or EK-FAC's if `corrected`.

    Args:
        given: what `collect` takes beside.
    """
    sums = KroneckerSums(projection)
    found = collect(model, inputs, loss, sums, **given)
    blocks = sums.blocks(found)
    if corrected and blocks:
        moments = SecondMoments(blocks, projection, found.names)
        blocks = moments.blocks(collect(model, inputs, loss, moments, **given))
    covered = {name for names in blocks for name in names}
    return Curvature(blocks, tuple(n for n in found.names if n not in covered), found)


class KroneckerSums(SampleSums):
    """Σ g gᵀ and Σ a aᵀ of every layer, and n: of each as the rows and columns of its matrix."""

    def __init__(self, projection: TwoSided) -> None:
        super().__init__({})
        self._projection = projection
        self._layers: dict[str, tuple[str, ...]] = {}  # weight → parameters
        self._without: set[str] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        self._shapes = {name: term.shape for name, term in terms.items()}
        factors = {name: _factors(t.widened(), self._projection) for name, t in terms.items()}
        biases = {name: _bias(name, terms) for name, of in factors.items() if of and not of[2]}
        for name, of_layer in factors.items():
            if of_layer is None and terms[name].rule != "zero":
                self._without.add(name)
            if of_layer is None or name in biases.values():
                continue
            left_nr, right_nc, _ = of_layer
            bias = biases.get(name)
            self._layers[name] = (name,) if bias is None else (name, bias)
            if bias is not None:
                right_nc = torch.cat([right_nc, right_nc.new_ones(len(right_nc), 1)], 1)
            num_n = left_nr.new_tensor(len(left_nr), dtype=torch.float64)
            products = {"left": left_nr.T @ left_nr, "right": right_nc.T @ right_nc, "n": num_n}
            self.add({f"{name}/{part}": x.double() for part, x in products.items()})

    def blocks(self, found: SampleResult) -> dict[tuple[str, ...], EigenBlock]:
        """Return K-FAC's block of every layer."""
        columns, totals = self._projection.columns(self._shapes), found.arrays
        blocks = {}
        for weight, parameters in self._layers.items():
            if weight in self._without:
                continue
            left, right = totals[f"{weight}/left"], totals[f"{weight}/right"]
            places = [torch.arange(columns[n].start, columns[n].stop) for n in parameters]
            index = torch.cat([place.view(len(left), -1) for place in places], 1)
            scale = found.samples * totals[f"{weight}/n"]
            blocks[parameters] = EigenBlock.of_factors(index, left, right / scale)
        return blocks


class SecondMoments(SampleSums):
    """Σ_b (U_Gᵀ M_b U_A)² of every layer."""

    def __init__(
        self,
        blocks: Mapping[tuple[str, ...], EigenBlock],
        projection: TwoSided,
        names: Sequence[str],
    ) -> None:
        super().__init__({})
        self._blocks, self._projection, self._names = blocks, projection, names

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        rows_BK = projected_rows(terms, self._projection, self._names)[:, 0].double()
        squares = {n[0]: block.rotated(rows_BK).square() for n, block in self._blocks.items()}
        self.add({name: squared.sum(0) for name, squared in squares.items()})

    def blocks(self, found: SampleResult) -> dict[tuple[str, ...], EigenBlock]:
        """Return EK-FAC's block of every layer."""
        return {
            names: replace(block, values=found.arrays[names[0]] / found.samples)
            for names, block in self._blocks.items()
        }


def _between(left: Tensor, blocks_Brc: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ M right of each block; left @ M is one product a block, 50 times as slow."""
    return (blocks_Brc.mT @ left).mT @ right


def _factors(term: Term, projection: TwoSided) -> tuple[Tensor, Tensor, bool] | None:
    """Return a layer's projected rows (n, r) and columns (n, c), and whether it is transposed."""
    if isinstance(term, Positions):
        left = term.left.mT if term.channels_first else term.left
        left_nr = projection.of_rows(left, term.parameter).flatten(0, 2)
        return left_nr, left_nr.new_ones(len(left_nr), 1), True
    outer = term.projected_factors(projection)
    if not isinstance(outer, Outer):
        return None
    left, right = outer.left.flatten(0, 2), outer.right.flatten(0, 1)
    return (right, left, True) if outer.transposed else (left, right, False)


def _bias(weight: str, terms: Terms) -> str | None:
    """Return the bias of a layer, by the names and shapes that torch's layers give theirs."""
    bias = weight.removesuffix("weight") + "bias"
    return bias if bias in terms and terms[bias].shape == terms[weight].shape[:1] else None
