"""A model as transformers builds it: nested outputs, dropout, activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient, shard_stream
from tests.cases import spread
from tests.device import DEVICE, REPLAYED, moved
from tests.oracle import TOLERANCE, difference

SEED = 4


def _bert(*, checkpointing: bool = False) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    ).double()
    model.to(DEVICE)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shards = []
    for size, length in ((3, 8), (3, 6), (2, 7)):
        tokens = torch.randint(1, 50, (size, length), generator=generator)
        mask = (torch.arange(length) < length - torch.arange(size)[:, None]).long()
        shards.append({"input_ids": tokens, "attention_mask": mask})
    return shards


def _mean(hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask_BT1 = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask_BT1).sum(1) / mask_BT1.sum(1)


def _naive(output: str, readout) -> dict[str, Tensor]:
    model = _bert().train()
    zs = []
    for i, shard in enumerate(_shards()):
        with shard_stream(SEED, 0, i):
            value = getattr(model(**moved(shard)), output)
        zs.append(value if readout is None else readout(value, moved(shard)))
    spread(torch.cat(zs)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize(
    ("output", "name", "readout"),
    [
        ("last_hidden_state", "last_hidden_state", _mean),
        (0, "last_hidden_state", _mean),
        ("pooler_output", "pooler_output", None),
    ],
)
def test_the_gradient_is_that_of_naive_code(output, name, readout, retain, checkpointing):
    result = set_gradient(
        _bert(checkpointing=checkpointing),
        [Group("z", _shards())],
        Objective(spread),
        mode="train",
        seed=SEED,
        output=output,
        readout=readout,
        retain=retain,
    )
    assert difference(result.grads, _naive(name, readout)) <= TOLERANCE
    assert result.replay_difference <= REPLAYED


def test_a_cut_by_sample_streams_does_not_show():
    tokens = torch.randint(1, 50, (6, 7), generator=torch.Generator().manual_seed(1))

    def gradient(sizes: list[int]) -> dict[str, Tensor]:
        shards = [{"input_ids": rows} for rows in tokens.split(sizes)]
        return set_gradient(
            _bert(),
            [Group("z", shards)],
            Objective(spread),
            mode="train",
            streams="sample",
            output="pooler_output",
        ).grads

    assert difference(gradient([4, 1, 1]), gradient([6])) < TOLERANCE
