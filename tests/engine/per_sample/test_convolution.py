"""Both implementations of a convolution's weight gradients, on shapes of either choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
from gradbox_factors import Convolution, Geometry, convolution
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import CASES, build

Implementation = Callable[..., Tensor]
IMPLEMENTATIONS = [convolution._grouped, convolution._unfolded]
CONVOLUTIONS = [name for name in CASES if "convolution" in name or "padding, " in name]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_either_implementation_gives_the_rows(
    monkeypatch: pytest.MonkeyPatch, implementation: Implementation, name: str
) -> None:
    for other in IMPLEMENTATIONS:
        monkeypatch.setattr(convolution, other.__name__, implementation)
    model, inputs = build(name)
    found = naive.flat(jacobian(model, [inputs]).arrays)
    assert naive.difference(found, naive.flat(naive.jacobian(model, inputs))) <= naive.TOLERANCE


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "chosen"),
    [(4, 8, 3, "_grouped"), (128, 8, 3, "_unfolded"), (4, 8, 1, "_unfolded")],
)
def test_the_choice_depends_on_the_shapes_alone(
    monkeypatch: pytest.MonkeyPatch, channels: int, size: int, kernel: int, chosen: str
) -> None:
    taken: list[str] = []
    for one in IMPLEMENTATIONS:

        def noted(*args: Any, one: Implementation = one) -> Tensor:
            taken.append(one.__name__)
            return one(*args)

        monkeypatch.setattr(convolution, one.__name__, noted)
    window = Geometry((kernel,) * 2, (1, 1), (0, 0), (1, 1), 1)
    steps = size - kernel + 1
    left, right = torch.randn(1, 2, 1, channels, steps, steps), torch.randn(2, 1, 3, size, size)
    Convolution("w", (channels, 3, kernel, kernel), left, right, window).block()
    assert taken == [chosen]


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_rows_take_channels_that_lie_last(*, transposed: bool) -> None:
    layer = nn.ConvTranspose2d(4, 5, 3) if transposed else nn.Conv2d(4, 5, 3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), layer, nn.Flatten(2))
    model = model.double().to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    factors = jacobian(model, [{"input": x}], form="factored").factors
    assert factors is not None
    rows = {name: factors.block(name).flatten(2) for name in factors.names}
    tangents = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    image = sum(rows[name] @ tangents[name].flatten() for name in rows)
    torch.testing.assert_close(factors.jvp(tangents), image)
    weights = torch.randn(factors.samples, factors.outputs, dtype=torch.float64)
    for name, summed in factors.vjp(weights).items():
        torch.testing.assert_close(summed.flatten(), torch.einsum("by,byp->p", weights, rows[name]))
