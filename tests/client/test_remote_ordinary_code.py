"""Ordinary code around a remote model that looks unlike a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gradbox import GradClient, InvalidInputs
from tests import case_models
from tests.boxes import TestBox
from tests.client.remote import NaiveModel
from tests.client.test_remote_oracle import shards_of
from tests.oracle import TOLERANCE, difference


@pytest.fixture
def client(twin: TestBox) -> Iterator[GradClient]:
    with twin.client() as client:
        yield client


class Halves(NamedTuple):
    left: Tensor
    right: Tensor


def test_outputs_in_a_named_tuple_are_fetched(client: GradClient) -> None:
    x, y = shards_of(2, 3)
    f, model = client.model("mlp"), case_models.mlp()
    torch.testing.assert_close(torch.cat(Halves(f(x), f(y))), torch.cat([model(x), model(y)]))


def test_an_output_is_first_used_in_a_checkpointed_function(client: GradClient) -> None:
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    for model in (f, naive):
        z = model(shards_of(4)[0])
        ones = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        squares = checkpoint(lambda y, z=z: (z.sin() * y).square(), ones, use_reentrant=False)
        squares.sum().backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_an_output_is_first_used_where_hooks_on_saved_tensors_are_forbidden(
    client: GradClient,
) -> None:
    z = client.model("mlp")(shards_of(4)[0])
    with disable_saved_tensors_hooks("forbidden"):
        loss = z.square().sum()
    loss.backward()


def test_a_readout_is_first_used_in_inference_mode(client: GradClient) -> None:
    def doubled(output: Tensor, inputs: Any) -> Tensor:
        return output * 2

    (x,) = shards_of(4)
    f = client.model("mlp", readout=doubled)
    with torch.inference_mode():
        torch.testing.assert_close(f(x) + 0, case_models.mlp()(x) * 2)


def test_a_weight_becomes_one_of_another_library(client: GradClient) -> None:
    (x,) = shards_of(4)
    model = case_models.mlp()
    f = client.model("mlp", weights={"4.bias": np.zeros(3)})
    z = f(x)
    f.weights["4.bias"] = model[4].bias
    torch.testing.assert_close(f(x), model(x))
    torch.testing.assert_close(z + model[4].bias, model(x))


def test_a_weight_of_another_dtype_between_calls_is_told_by_name(client: GradClient) -> None:
    (x,) = shards_of(4)
    model = case_models.mlp()
    f = client.model("mlp", weights={"4.bias": model[4].bias})
    assert f(x).isfinite().all()
    f(x)
    f.weights["4.bias"] = model[4].bias.float()
    with pytest.raises(InvalidInputs, match=r"4\.bias.*float64"):
        f(x).sum()
