"""Products of factors where arithmetic is at its limits: shared memory, cancellation, 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbox_factors import Factored, Outer, Positions, Term

DOUBLE = torch.float64


def made(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def whole_rows(factors: Factored) -> Tensor:
    """Return the rows of all parameters side by side, (B, Y, P), float64."""
    return torch.cat([factors.block(name).double().flatten(2) for name in factors.names], 2)


def two_layers_of_one_gradient() -> dict[str, Term]:
    """a(x) + b(xᵀ)ᵀ with as many positions as features: both output gradients lie in one memory.

    Only a has a bias, only b a weight that counts.
    """
    left, right = made(2, 3, 6, 6), made(3, 6, 400, seed=1)
    return {
        "a.bias": Positions("a.bias", (6,), left),
        "b.weight": Outer("b.weight", (6, 400), left.mT, right),
    }


def test_a_gram_tells_transposed_views_of_one_gradient_apart() -> None:
    terms = two_layers_of_one_gradient()
    factors = Factored([terms])
    rows = whole_rows(factors)
    torch.testing.assert_close(factors.gram(), torch.einsum("byp,czp->bycz", rows, rows))
    torch.testing.assert_close(factors.gram(trace=True), torch.einsum("byp,cyp->bc", rows, rows))


def test_transposed_views_of_one_gradient_are_two_factors() -> None:
    factors = Factored([two_layers_of_one_gradient()])
    assert factors.factor_bytes == 8 * (2 * 3 * 6 * 6 * 2 + 3 * 6 * 400)
