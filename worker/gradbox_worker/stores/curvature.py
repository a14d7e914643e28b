"""Curvature of a store: the kernel of its rows; how any is kept in a file, and applied to queries.

A file has for each block curvature/NAME/PART, PART being index, left, right and values, as
`EigenBlock` has them. The kernel is H = ΦᵀΦ/N of all rows Φ (N, K), a block of 1 × K numbers; of
each parameter by itself where K is more than `MOST_TOGETHER`.

Source: Park et al. 2023, "TRAK", arXiv:2303.14186, whose ΦᵀΦ is N times that.
Cost: N K² multiplications, and the eigenvectors of K × K numbers in float64: minutes for K = 8192.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import CurvatureView
from gradbox_engine.per_sample.curvature import EigenBlock
from gradbox_factors.two_sided import column_slices
from gradbox_worker.stores.rows import blocks_of, opened, rows_of
from gradbox_worker.work import StoreAsRead

MOST_TOGETHER: Final = 8192
PARTS: Final = [field.name for field in fields(EigenBlock)]

Blocks = Mapping[tuple[str, ...], EigenBlock]


def kernel_of(store: StoreAsRead, *, device: torch.device) -> tuple[Blocks, int]:
    """Return the kernel of a store's rows, and how many these are.

    Raises:
        InvalidInputs: they are too long, and of no layers.
    """
    columns = column_slices(store.columns)
    size = sum(store.columns.values())
    slices: dict[tuple[str, ...], slice] = {(name,): part for name, part in columns.items()}
    if size <= MOST_TOGETHER:
        slices = {tuple(columns): slice(0, size)}
    sums = {}
    for names, part in slices.items():
        length = part.stop - part.start
        if length > MOST_TOGETHER:
            raise InvalidInputs(
                f"kernel: expected at most {MOST_TOGETHER} numbers together, got {length} of "
                f"{names[0]}: make a store whose projection has fewer"
            )
        sums[names] = torch.zeros(length, length, dtype=torch.float64, device=device)
    num_rows = 0
    for rows in rows_of(blocks_of(store.parts), device=device):
        num_rows += len(rows)
        for names, part in slices.items():
            sums[names] += rows[:, part].T @ rows[:, part]
    place, one = torch.arange(size), torch.ones(1, 1, device=device)
    return {
        names: EigenBlock.of_factors(place[None, part], one, sums[names] / num_rows)
        for names, part in slices.items()
    }, num_rows


def written(blocks: Blocks) -> dict[str, Tensor]:
    """Return the tensors of a file; eigenvectors in float32, which halves it."""
    return {
        f"curvature/{names[0]}/{part}": x.float() if part in ("left", "right") else x
        for names, block in blocks.items()
        for part, x in vars(block).items()
    }


def preconditioned(
    queries: Tensor, store: StoreAsRead, *, damping: float | None
) -> tuple[Tensor, CurvatureView]:
    """Return (H + λ)⁻¹ times each query (Q, K), in float32, and what H was; zero beside its blocks.

    Args:
        damping: λ; by default that of the fit.

    Raises:
        InvalidInputs: the curvature is not on this machine.
    """
    assert store.curvature is not None
    path, view = store.curvature
    view = view if damping is None else view.model_copy(update={"damping": damping})
    rows, solved = queries.float(), torch.zeros_like(queries, dtype=torch.float32)
    with opened(path, device=str(queries.device)) as file:
        for names in view.layers:
            parts = {part: file.get_tensor(f"curvature/{names[0]}/{part}") for part in PARTS}
            EigenBlock(**parts).solve(rows, solved, damping=view.damping)
    return solved, view
