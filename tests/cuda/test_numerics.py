"""Attention's kernels, recurrent layers, precisions, and equal bits where torch promises them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine import Group, ModelCallFailed, Objective, set_gradient, shard_stream
from gradbox_engine.model.precision import REPLAY_TOLERANCE
from tests.cases import CASES
from tests.device import AGAINST_FP64, DEVICE, on_cuda_alone
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive

pytestmark = on_cuda_alone

HEADS, WIDTH, POSITIONS = 4, 64, 128
SEED = 3
ROOT = Path(__file__).resolve().parents[2]


class Attention(nn.Module):
    """One layer of attention with dropout inside, mean-pooled: (B, T, D) to (B, D)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 16)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.into(x).chunk(3, -1)
        )
        drop = self.dropout if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        z: Tensor = self.out(h.transpose(1, 2).flatten(2)).mean(1)
        return z


def _sequences(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    size = (8, POSITIONS, HEADS * WIDTH)
    return [{"x": torch.randn(size, generator=draw).to(dtype)} for _ in range(3)]


def _spread(z: Tensor) -> Tensor:
    return (z @ z.T).square().mean() + z.sum(0).tanh().sum()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "kernel",
    [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ],
    ids=lambda kernel: kernel.name,
)
def test_every_kernel_of_attention_replays(kernel: SDPBackend, dropout: float) -> None:
    model = Attention(dropout).bfloat16().to(DEVICE)
    shards = _sequences(torch.bfloat16)
    with sdpa_kernel(kernel):
        try:
            result = set_gradient(
                model, [Group("z", shards)], Objective(_spread), mode="train", seed=SEED
            )
        except ModelCallFailed as error:
            if "No available kernel" in str(error.__cause__):
                pytest.skip(f"{kernel.name} is not built, or not for this device: {error}")
            raise
        zs = []
        for index, shard in enumerate(shards):
            with shard_stream(SEED, 0, index):
                zs.append(model.train()(shard["x"].to(DEVICE)))
        _spread(torch.cat(zs).float()).backward()
    assert result.replayed == 2
    assert result.replay_difference <= REPLAY_TOLERANCE[torch.bfloat16]
    expected = {name: p.grad.float() for name, p in model.named_parameters()}
    assert difference(result.grads, expected) < 2e-2


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_replay_in_both_modes(kind: type[nn.RNNBase], mode: Any) -> None:
    torch.manual_seed(0)
    layers = kind(8, 16, num_layers=2, dropout=0.3, batch_first=True).to(DEVICE)
    draw = torch.Generator().manual_seed(1)
    shards = [{"input": torch.randn(4, 7, 8, generator=draw)} for _ in range(3)]
    before = torch.backends.cudnn.enabled
    result = set_gradient(layers, [Group("z", shards)], Objective(_flat), mode=mode, output=0)
    assert result.replay_difference <= REPLAY_TOLERANCE[torch.float32]
    assert torch.backends.cudnn.enabled == before
    assert not layers._forward_pre_hooks


def _flat(z: Tensor) -> Tensor:
    return _spread(z.flatten(1))


def test_the_problem_tables_recurrent_case_in_eval_mode() -> None:
    case = replace(CASES["lstm"](), mode="eval")
    assert difference(answer(case).grads, naive(case).grads) <= TOLERANCE


def test_tensorfloat_is_used_where_it_is_asked_for_and_nowhere_else() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 256)).to(DEVICE)
    draw = torch.Generator().manual_seed(1)
    shards = [{"0": torch.randn(256, 512, generator=draw)} for _ in range(3)]

    def gradient(precision: Any) -> dict[str, Tensor]:
        objective = Objective(lambda z: z.square().mean(1).exp().sum())
        return set_gradient(model, [Group("z", shards)], objective, precision=precision).grads

    exact = gradient("fp64")
    apart = {p: difference(gradient(p), exact) for p in ("fp32", "tf32", "bf16", "fp16")}
    for precision, found in apart.items():
        assert found < AGAINST_FP64["cuda"][precision], apart
    if torch.cuda.get_device_capability(DEVICE) >= (8, 0):
        assert apart["tf32"] > 10 * apart["fp32"], apart
    assert not torch.backends.cuda.matmul.allow_tf32


DETERMINISTIC = """
import torch
torch.use_deterministic_algorithms(True)
from tests.cases import CASES
from tests.engine.replay.running import answer
for name in {names}:
    first, again, kept = (answer(CASES[name](), retain=r) for r in (0, 0, 10**9))
    for other in (again, kept):
        assert other.loss == first.loss, name
        assert other.replay_difference == first.replay_difference == 0, name
        for parameter, gradient in first.grads.items():
            assert torch.equal(other.grads[parameter], gradient), (name, parameter)
print("equal bits")
"""


def test_deterministic_algorithms_give_equal_bits_whatever_is_kept() -> None:
    names = ["mlp, a sum", "in-place activations", "cnn in train", "lstm", "two towers"]
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC.format(names=[n for n in names if n in CASES])],
        env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("equal bits"), done.stderr
