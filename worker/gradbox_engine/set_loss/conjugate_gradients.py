"""Conjugate gradients: (C + λI) x = v for several vectors, by products with C alone.

Source: Hestenes and Stiefel 1952, "Methods of Conjugate Gradients for Solving Linear Systems",
section 3. Each vector has steps of its own; one whose residual is small enough takes no further
part. Scalars are in float64. In exact arithmetic as many steps as C has different eigenvalues are
enough; rounding takes more, and the residuals that are returned are those of one product more.

Legend: V vectors, A of them still to be solved, P numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradbox_engine.errors import NotPositiveDefinite

Product = Callable[[Tensor], Tensor]
"""Multiplies rows (A, P) with a symmetric matrix."""


class Solution(NamedTuple):
    """x, and by vector the steps that it took and ‖v − (C + λI) x‖ / ‖v‖."""

    x: Tensor  # (V, P)
    iterations: tuple[int, ...] = ()
    residuals: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients:
    """How far to go.

    Args:
        damping: λ.
        max_iterations: steps at most; fewer where all residuals are small enough before.
        tolerance: ‖v − (C + λI) x‖ / ‖v‖ at which a vector is solved.
    """

    damping: float
    max_iterations: int = 100
    tolerance: float = 1e-5

    def solve(self, product: Product, v_VP: Tensor) -> Solution:
        """Return x of every vector.

        Raises:
            NotPositiveDefinite: C + λI is not, as a step along one of the vectors shows.
        """
        x_VP, r_VP, p_VP = torch.zeros_like(v_VP), v_VP.clone(), v_VP.clone()
        squares_V = wanted_V = _inner(v_VP, v_VP)
        iterations_V = torch.zeros_like(squares_V, dtype=torch.int64)
        for _ in range(self.max_iterations):
            left_A = (squares_V > self.tolerance**2 * wanted_V).nonzero().flatten()
            if not len(left_A):
                break
            p_AP = p_VP[left_A]
            bent_AP = self._damped(product, p_AP)
            curvature_A = _inner(p_AP, bent_AP)
            self._check(curvature_A / _inner(p_AP, p_AP), left_A, iterations_V)
            step_A1 = (squares_V[left_A] / curvature_A).to(v_VP.dtype).unsqueeze(1)
            x_VP[left_A] += step_A1 * p_AP
            r_VP[left_A] -= step_A1 * bent_AP
            squares_A = _inner(r_VP[left_A], r_VP[left_A])
            again_A1 = (squares_A / squares_V[left_A]).to(v_VP.dtype).unsqueeze(1)
            p_VP[left_A] = r_VP[left_A] + again_A1 * p_AP
            squares_V = squares_V.index_copy(0, left_A, squares_A)
            iterations_V[left_A] += 1
        missed_VP = v_VP - self._damped(product, x_VP)
        residuals_V = (_inner(missed_VP, missed_VP) / wanted_V.clamp_min(1e-300)).sqrt()
        return Solution(x_VP, tuple(iterations_V.tolist()), tuple(residuals_V.tolist()))

    def _damped(self, product: Product, x_AP: Tensor) -> Tensor:
        return product(x_AP) + self.damping * x_AP

    def _check(self, curvature_A: Tensor, left_A: Tensor, iterations_V: Tensor) -> None:
        worst = int(curvature_A.nan_to_num(nan=-torch.inf).argmin())
        if float(curvature_A[worst]) > 0:
            return
        vector = int(left_A[worst])
        raise NotPositiveDefinite(
            f"vector {vector}, step {int(iterations_V[vector]) + 1}: expected positive curvature "
            f"with damping={self.damping:g}, got {float(curvature_A[worst]):.3g} along a "
            f"direction; raise damping by more than that, or take kind='ggn', which has none "
            f"below zero where the loss is convex in the model's outputs"
        )


def _inner(a_VP: Tensor, b_VP: Tensor) -> Tensor:
    """Return the inner product of each pair of rows, (V,), in float64."""
    return torch.stack([torch.dot(a.double(), b.double()) for a, b in zip(a_VP, b_VP, strict=True)])
