"""Ordinary code around a remote model that looks unlike a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import GradClient
from tests import case_models
from tests.boxes import TestBox
from tests.client.test_remote_oracle import shards_of


@pytest.fixture
def client(twin: TestBox) -> Iterator[GradClient]:
    with twin.client() as client:
        yield client


def test_a_readout_is_first_used_in_inference_mode(client: GradClient) -> None:
    def doubled(output: Tensor, inputs: Any) -> Tensor:
        return output * 2

    (x,) = shards_of(4)
    f = client.model("mlp", readout=doubled)
    with torch.inference_mode():
        torch.testing.assert_close(f(x) + 0, case_models.mlp()(x) * 2)
