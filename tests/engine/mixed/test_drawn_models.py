"""Mixed gradients through models of random layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.engine.drawn_models import NUM_OUTPUTS, DrawnModel, samples
from tests.engine.mixed.running import mixed_answer
from tests.mixed_cases import TOLERANCE, MixedCase, cubic, double_backward, penalty, with_y
from tests.oracle import difference


@pytest.mark.parametrize("seed", range(40))
def test_the_gradient_is_that_of_double_backward(seed: int) -> None:
    reads = seed % 3 == 0
    case = MixedCase(
        model=partial(DrawnModel, seed),
        shards=samples(seed, [2, 1, 3][: 1 + seed % 3]),
        inner=cubic,
        outer=with_y if reads else penalty,
        y={"y": torch.linspace(-1, 1, NUM_OUTPUTS, dtype=torch.float64)},
        outer_reads=("y",) if reads else (),
        mode="train" if seed % 2 else "eval",
    )
    expected, result = double_backward(case), mixed_answer(case)
    assert difference(result.grads, expected.grads) <= 100 * TOLERANCE
    torch.testing.assert_close(result.dfdz, expected.dfdz, rtol=1e-9, atol=1e-11)
