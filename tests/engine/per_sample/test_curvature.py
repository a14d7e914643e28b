"""Curvature of layers that the models of the boxes lack; `tests/client/test_curvature` has others.

Shapes: B samples, T positions, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox_engine.per_sample.curvature import Curvature, kronecker
from gradbox_factors import TwoSided
from tests.engine.per_sample import naive

B, T = 6, 5


class Transposed(nn.Module):
    """A token model whose first layer multiplies by a weight (I, O), as GPT-2's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(3))
        self.norm = nn.LayerNorm(3)
        self.twice = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        h = torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], 3)
        return self.twice(self.twice(self.norm(h.tanh()))).mean(1)


def loss(z: Tensor) -> Tensor:
    return z.square().sum(1)


def fitted(dim: int, *, corrected: bool) -> tuple[Curvature, Transposed, Tensor]:
    torch.manual_seed(0)
    model, ids = Transposed().double(), torch.randint(7, (B, T))
    shards = [{"0": ids[:2]}, {"0": ids[2:]}]
    return kronecker(model, shards, loss, TwoSided(dim, 1), corrected=corrected), model, ids


def test_a_bias_of_a_transposed_product_is_a_layer_with_the_input_one() -> None:
    found, model, ids = fitted(100, corrected=False)
    assert [*found.blocks] == [("weight",), ("bias",), ("twice.weight", "twice.bias")]
    assert set(found.left_out) == {"table.weight", "norm.weight", "norm.bias"}
    x = model.table(ids).detach()
    h = torch.addmm(model.bias, x.flatten(0, 1), model.weight).view(B, T, 3)
    h.retain_grad()
    loss(model.twice(model.twice(model.norm(h.tanh()))).mean(1)).sum().backward()
    g = h.grad
    assert g is not None
    A = torch.einsum("bti,btj->ij", x, x) / (B * T)
    G = torch.einsum("bto,btp->op", g, g) / B
    dense = {("weight",): torch.kron(A, G), ("bias",): G}
    rows = torch.randn(2, sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for names, H in dense.items():
        block, out = found.blocks[names], torch.zeros_like(rows)
        block.solve(rows, out, damping=0.01)
        wanted = torch.linalg.solve(
            H + 0.01 * torch.eye(len(H), dtype=H.dtype), rows[:, block.index].flatten(1).T
        ).T
        assert naive.difference(out[:, block.index].flatten(1), wanted) <= 1e-9
        assert out.count_nonzero() == wanted.numel()


def test_corrected_eigenvalues_are_the_second_moments_of_rows() -> None:
    found, model, ids = fitted(2, corrected=True)
    rows = naive.rows(loss(model(ids))[:, None], dict(model.named_parameters()))
    for name in ("weight", "bias"):
        block = found.blocks[name,]
        projected = rows[name][:, 0]
        matrices = projected.unsqueeze(2) if projected.dim() == 2 else projected
        for side, axis in (("rows", 1), ("columns", 2)):
            matrix = TwoSided(2, 1).matrix(name, side, matrices.shape[axis], like=matrices)
            if matrix is not None:
                matrices = torch.tensordot(matrices, matrix, ([axis], [0])).movedim(-1, axis)
        moments = (block.left.T @ matrices @ block.right).square().mean(0)
        assert naive.difference(block.values, moments) <= 1e-9


def test_what_no_loss_reaches_has_no_curvature() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    found = kronecker(
        model, [{"0": x}], lambda z: F.relu(z[:, 0] * 0.0), TwoSided(9), corrected=True
    )
    rows = torch.ones(1, 14, dtype=torch.float64)
    for block in found.blocks.values():
        assert not block.values.any()
        out = torch.zeros_like(rows)
        block.solve(rows, out, damping=None)
        assert not out.any()
