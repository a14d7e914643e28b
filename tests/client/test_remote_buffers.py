"""Buffers among the live weights of a remote model: set by the user, advanced by the calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import case_models
from tests.boxes import TestBox
from tests.client import zoo
from tests.client.remote import NaiveModel
from tests.oracle import TOLERANCE, difference

NEAR = {"rtol": TOLERANCE, "atol": TOLERANCE}
AVERAGE = "average"


def shard(seed: int, width: int = 5) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(4, width, dtype=torch.float64, generator=numbers)


def step(model: Any, seed: int, width: int = 5) -> Tensor:
    z: Tensor = model(shard(seed, width))
    z.square().sum().backward()
    return z.detach()


def test_a_buffer_that_the_user_changes_is_laid_over_again(box: TestBox) -> None:
    naive = NaiveModel(case_models.average_in_place(), mode="eval")
    live = torch.zeros(4, dtype=torch.float64)
    with box.client() as client:
        f = client.model("average_in_place", weights={AVERAGE: live})
        for seed in range(3):
            live += 0.5
            naive.module.get_buffer(AVERAGE).copy_(live)
            torch.testing.assert_close(step(f, seed), step(naive, seed), **NEAR)
        torch.testing.assert_close(f.buffers[AVERAGE], live, **NEAR)
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_a_buffer_that_stays_as_it_was_given_advances(twin: TestBox) -> None:
    model = case_models.average_in_place()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    naive = NaiveModel(model, mode="train")
    with twin.client() as client:
        f = client.model("average_in_place", mode="train", weights=state)
        for seed in range(3):
            state["inner.bias"] += 0.1  # which begins another job, and moves no buffer
            with torch.no_grad():
                naive.module.get_parameter("inner.bias").add_(0.1)
            torch.testing.assert_close(step(f, seed), step(naive, seed), **NEAR)
        torch.testing.assert_close(f.buffers[AVERAGE], naive.module.get_buffer(AVERAGE), **NEAR)


def test_a_buffer_advances_from_what_it_was_last_set_to(twin: TestBox) -> None:
    naive = NaiveModel(case_models.average_in_place(), mode="train")
    with twin.client() as client:
        f = client.model("average_in_place", mode="train")
        step(f, 0), step(naive, 0)
        f.weights[AVERAGE] = torch.full((4,), 2.0, dtype=torch.float64)
        naive.module.get_buffer(AVERAGE).fill_(2.0)
        for seed in (1, 2):
            torch.testing.assert_close(step(f, seed), step(naive, seed), **NEAR)
            f.weights["inner.bias"] = torch.full((4,), float(seed), dtype=torch.float64)
            naive.module.get_parameter("inner.bias").data.fill_(float(seed))
        torch.testing.assert_close(step(f, 3), step(naive, 3), **NEAR)
        torch.testing.assert_close(f.buffers[AVERAGE], naive.module.get_buffer(AVERAGE), **NEAR)


def test_the_state_of_a_model_with_a_shared_batch_norm_has_each_buffer_twice(twin: TestBox) -> None:
    model = zoo.shared_norm()
    assert {"first.running_mean", "second.running_mean"} <= model.state_dict().keys()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    naive = NaiveModel(model, mode="train")
    with twin.client() as client:
        f = client.model("shared_norm", mode="train", weights=state)
        for seed in range(3):
            torch.testing.assert_close(step(f, seed), step(naive, seed), **NEAR)
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_buffers_of_calls_in_float64_are_not_rounded_where_a_job_ends(twin: TestBox) -> None:
    naive = NaiveModel(zoo.tied().double(), mode="train")  # registered in float32
    with twin.client() as client:
        f = client.model("tied", mode="train", precision="fp64")
        for seed in range(3):
            torch.testing.assert_close(step(f, seed, 3), step(naive, seed, 3), **NEAR)
        f.eval(), naive.module.eval()
        torch.testing.assert_close(step(f, 3, 3), step(naive, 3, 3), **NEAR)
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_an_attribute_that_calls_change_is_warned_of_once_before_it_matters(twin: TestBox) -> None:
    naive = NaiveModel(zoo.counting())
    with twin.client() as client, warnings.catch_warnings(action="error"):
        f = client.model("counting")
        zs = [f(shard(seed)) for seed in range(2)]
        torch.testing.assert_close(torch.cat(zs), torch.cat([naive(shard(s)) for s in range(2)]))
        with pytest.warns(UserWarning, match=r"'counting'.*calls, seen\[by\]\. .* one job"):
            step(f, 2)
        step(f, 3)
