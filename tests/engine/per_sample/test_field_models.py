"""Ways in which models of the field use parameters: rows are exact, and none is looped over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B, T = 5, 6


def _p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_of_16_bits_with_a_vector_take_no_loop(precision: Any) -> None:
    """Their gradients are float32, and as rough as the products."""
    torch.manual_seed(0)
    model = Written(lambda m, x: (x @ m.v).softmax(1)[:, None] @ x, v=_p(4)).to(DEVICE)
    inputs = moved({"0": torch.randn(B, T, 4)})
    assert not jacobian(model, [inputs], precision=precision).loops


class _Rounding(nn.Module):
    """A root-mean-square norm that computes in float32, as Llama's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight.float().mul(wide).to(x.dtype)


def test_a_norm_that_rounds_inside_does_not_make_double_precision_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Rounding(), nn.Flatten(), nn.Linear(4 * T, 3))
    inputs = {"0": torch.randn(B, T, 4)}
    for _ in range(2):
        result = jacobian(model, [inputs], precision="fp64")
        assert not result.loops
    expected = naive.jacobian(model.double(), {"0": inputs["0"].double()})
    assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) < 1e-6


_SMALL: dict[str, Any] = {"vocab_size": 50, "use_cache": False}
_HIDDEN = {**_SMALL, "hidden_size": 16, "num_attention_heads": 2}
_DECODER = {**_HIDDEN, "num_hidden_layers": 2, "num_key_value_heads": 1, "intermediate_size": 24}

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ENCODER = {**_HIDDEN, "num_hidden_layers": 2, "intermediate_size": 32, "pad_token_id": 1}
_T5: dict[str, Any] = {
    "vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2": (
        "DebertaV2",
        {
            **_HIDDEN, "num_hidden_layers": 2, "intermediate_size": 32, "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "max_position_embeddings": 16,
        },
    ),
    "funnel": (
        "Funnel",
        {
            "vocab_size": 50, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8,
            "d_inner": 32, "num_decoder_layers": 1,
        },
    ),
    "recurrent gemma": (
        "RecurrentGemma",
        {**_DECODER, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8},
    ),
    "swin": (
        "Swin",
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1],
            "num_heads": [2, 2], "window_size": 4,
        },
    ),
    "t5": ("T5Encoder", _T5),
    "switch": (
        "SwitchTransformers",
        {
            **_T5, "num_decoder_layers": 1, "num_experts": 4, "expert_capacity": 64,
            "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        },
    ),
    **{
        f"mixtral, {experts}": (
            "Mixtral", {**_DECODER, **_EXPERTS, "experts_implementation": experts}
        )
        for experts in ("batched_mm", "eager")
    },
    "qwen2 moe": (
        "Qwen2Moe",
        {
            **_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "experts_implementation": "eager",
        },
    ),
    "gpt-oss": (
        "GptOss", {**_DECODER, **_EXPERTS, "head_dim": 8, "experts_implementation": "eager"}
    ),
    "llama": ("Llama", _DECODER),
    "rwkv": ("Rwkv", {**_SMALL, "hidden_size": 16, "num_hidden_layers": 2}),
    "bert": ("Bert", _ENCODER),
    "longformer": (
        "Longformer", {**_ENCODER, "attention_window": 4, "max_position_embeddings": 64}
    ),
    "gpt2": ("GPT2", {**_SMALL, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "vit": (
        "ViT",
        {
            "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_attention_heads": 2,
            "num_hidden_layers": 2, "intermediate_size": 32,
        },
    ),
}  # fmt: skip
"""By name: the family and its settings. No parameter but those of experts is looped over."""

_IMAGES = frozenset({"swin", "vit"})


class _Pooled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        z: Tensor = self.model(**inputs).last_hidden_state
        return z.flatten(1).square().mean(1, keepdim=True)


def _model(name: str) -> nn.Module:
    import transformers  # takes seconds

    torch.manual_seed(0)
    family, settings = MODELS[name]
    config_class = f"{family.removesuffix('Encoder')}Config"
    config = getattr(transformers, config_class)(**settings)
    built: nn.Module = getattr(transformers, f"{family}Model")(config).eval()
    for parameter in built.parameters():  # what begins at zero hides everything behind it
        nn.init.normal_(parameter, std=0.2) if not parameter.any() else None
    return built


@pytest.mark.parametrize("name", MODELS)
def test_transformers_have_no_loop_but_over_their_experts(name: str) -> None:
    model = _Pooled(_model(name).double()).to(DEVICE)
    inputs = {"input_ids": torch.randint(3, 40, (3, 7))}
    if name == "switch":
        inputs["decoder_input_ids"] = torch.randint(3, 40, (3, 5))
    if name in _IMAGES:
        inputs = {"pixel_values": torch.randn(3, 3, 16, 16, dtype=torch.float64)}
    inputs = moved(inputs)
    expected = naive.flat(naive.jacobian(model, inputs))[:, 0]
    for _ in range(2):
        result = per_sample_gradient(model, [inputs], lambda z: z[:, 0])
        assert naive.difference(naive.flat(result.arrays, lead=1), expected) <= 1e-7
        assert all("experts" in parameter for parameter in result.loops)
