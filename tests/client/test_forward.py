"""`Forward`: outputs alone, on both boxes."""

from __future__ import annotations

import pytest
import torch

from gradbox import Forward, GradResult, InvalidJob
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES

WAIT_S = 120.0


def submitted(box: TestBox, forward: Forward) -> GradResult:
    with box.client() as client:
        return client.submit(forward).result(WAIT_S)


def test_outputs_are_those_of_naive_code_under_the_same_streams(box: TestBox) -> None:
    shards = CASES["mlp"]().groups["z"]
    result = submitted(box, Forward(model="mlp", inputs=shards, mode="train", seed=3))
    model = case_models.mlp().train()
    zs = []
    for index, shard in enumerate(shards):
        with shard_stream(3, group=0, shard=index):
            zs.append(model(shard["0"]))
    assert torch.equal(result.outputs["z"], torch.cat(zs).detach())
    assert result.manifest.rows == {"z": [len(z) for z in zs]}
    assert result.manifest.computation == "forward"


def test_outputs_follow_the_order_and_keep_their_dtype(box: TestBox) -> None:
    x = torch.randn(5, 5, dtype=torch.float64)
    order = torch.tensor([4, 2, 0, 1, 3])
    result = submitted(box, Forward(model="mlp", inputs=[x[:2], x[2:]], order=order))
    assert result.outputs["z"].dtype == torch.float64
    torch.testing.assert_close(result.outputs["z"], case_models.mlp()(x)[order].detach())


def test_buffers_advance_once_per_shard(box: TestBox) -> None:
    case = CASES["cnn in train"]()
    shards = case.groups["z"]
    name = case.model.__name__
    result = submitted(
        box, Forward(model=name, inputs=shards, mode="train", returns=("outputs", "buffers"))
    )
    model = case.model().train()
    for index, shard in enumerate(shards):
        with shard_stream(0, group=0, shard=index):
            model(*shard.values())
    for buffer, value in model.named_buffers():
        torch.testing.assert_close(result.buffers[buffer], value)


def test_outputs_have_no_loss(box: TestBox) -> None:
    result = submitted(box, Forward(model="mlp", inputs=[torch.ones(2, 5).double()]))
    with pytest.raises(InvalidJob, match="forward"):
        _ = result.loss
    assert "loss" not in repr(result)
