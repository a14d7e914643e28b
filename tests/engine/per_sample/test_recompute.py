"""Rows of shards whose blocks are computed again: those of a whole graph, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import CoupledSamples, jacobian, per_sample_gradient
from gradbox_engine.requests import Recomputed
from tests.device import same_bits
from tests.engine.memory import peak_bytes
from tests.engine.model.test_recompute import Residual, crowded

WIDTH = 8


def model(*, fits: int = 100) -> nn.Module:
    """Return one of which shards of fewer samples fit."""
    torch.manual_seed(0)
    return crowded(fits, nn.Linear(WIDTH, 2))


def shards(*sizes: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"0": torch.randn(n, WIDTH, dtype=torch.float64)} for n in sizes]


def loss(z: Tensor) -> Tensor:
    return z.square().sum(-1)


def rows(recompute: str, sizes: tuple[int, ...], *, own: nn.Module | None = None, **options):
    return per_sample_gradient(
        own or model(), shards(*sizes), loss, recompute=recompute, precision="fp64", **options
    )


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2)])
def test_rows_of_recomputed_shards_are_those_of_whole_graphs(mode, sizes):
    off, on = (rows(recompute, sizes, mode=mode) for recompute in ("off", "blocks"))
    assert on.recomputed == Recomputed(("0", "1"), len(sizes))
    assert set(on.loops) == set(on.names)
    for name, array in off.arrays.items():
        torch.testing.assert_close(on.arrays[name], array, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2)])
def test_so_are_jacobians_and_what_rows_are_reduced_to(sizes):
    cotangents = torch.randn(sum(sizes), 2, dtype=torch.float64)
    for options in ({}, {"reduce": "gram"}, {"reduce": "vjp", "vectors": cotangents}):
        off, on = (
            jacobian(model(), shards(*sizes), recompute=recompute, precision="fp64", **options)
            for recompute in ("off", "blocks")
        )
        for name, array in off.arrays.items():
            torch.testing.assert_close(on.arrays[name], array, rtol=1e-12, atol=1e-14)


def test_only_a_sample_that_does_not_fit_is_recomputed():
    narrow = model(fits=1)
    with pytest.raises(torch.OutOfMemoryError):
        rows("off", (1, 1), own=narrow)
    found = rows("auto", (1, 1), own=narrow, mode="train")
    assert found.recomputed == Recomputed(("0", "1", "2"), 2)
    assert rows("auto", (1, 1)).recomputed == Recomputed()
    expected = rows("blocks", (1, 1), mode="train")
    assert all(
        same_bits(one, other)
        for one, other in zip(found.arrays.values(), expected.arrays.values(), strict=True)
    )


def test_samples_that_do_not_fit_together_are_called_one_by_one():
    found = rows("auto", (6, 3), own=model(fits=6))  # than probe runs have
    assert found.recomputed.shards == 1
    expected = rows("off", (6, 3))
    assert not expected.loops
    for name, array in expected.arrays.items():
        torch.testing.assert_close(found.arrays[name], array, rtol=1e-12, atol=1e-14)


def test_several_samples_under_one_mask_that_do_not_fit_have_to_go_in_smaller_shards():
    with pytest.raises(torch.OutOfMemoryError, match="a shard of 5 samples: make the shards"):
        rows("auto", (5,), own=model(fits=1), mode="train")
    cotangents = {"vectors": torch.ones(5, 2, dtype=torch.float64), "reduce": "vjp"}
    narrow = model(fits=1)
    found = jacobian(narrow, shards(5), precision="fp64", **cotangents)
    assert found.recomputed.shards == 1


def test_samples_that_meet_are_refused_here_too():
    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x - x.mean(0))

    torch.manual_seed(0)
    with pytest.raises(CoupledSamples):
        rows("blocks", (4,), own=nn.Sequential(Meeting(), Meeting()))


def test_the_peak_is_lower():
    deep = nn.Sequential(*(Residual(16) for _ in range(12)))
    x = [{"0": torch.randn(1, 2000, 16)}]

    def peak(recompute: str) -> int:
        def step() -> None:
            per_sample_gradient(deep, x, lambda z: z.sum((1, 2)), recompute=recompute)

        return peak_bytes(step)

    whole = peak("off")
    assert peak("*") < 0.35 * whole
    assert peak("blocks") < 0.6 * whole
