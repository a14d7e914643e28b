"""Models with compiled parts: recorded as they were written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradbox_engine.per_sample import per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive

BACKEND = "aot_eager"  # which needs no compiler


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(DEVICE)


def _in_place() -> nn.Module:
    model = _plain()
    model.compile(backend=BACKEND)
    return model


def _a_layer() -> nn.Module:
    model = _plain()
    model[0] = torch.compile(model[0], backend=BACKEND)
    return model


@pytest.mark.parametrize("build", [_in_place, _a_layer])
def test_rows_of_compiled_models_take_no_loop(build: Callable[[], nn.Module]) -> None:
    shard = moved({"input": torch.randn(7, 5, dtype=torch.float64)})
    plain = _plain()
    losses = plain(shard["input"]).square().sum(1)
    expected = naive.rows(losses[:, None], dict(plain.named_parameters()))
    found = per_sample_gradient(build(), [shard], lambda z: z.square().sum(1))
    assert not found.loops
    for array, rows in zip(found.arrays.values(), expected.values(), strict=True):
        torch.testing.assert_close(array, rows[:, 0])
