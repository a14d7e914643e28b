"""Attention and transformers.

`nn.MultiheadAttention` asks whether there is a batch dimension; the function beneath it asks again,
so that call is recorded whole. What is recorded of `nn.TransformerEncoderLayer` is what it computes
with gradients: its fused inference kernels are not. `nn.TransformerDecoder` compares its mask with
a causal one, to tell kernels that no graph takes.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from gradbox.tracing.refusals import instead_of
from gradbox.tracing.source_location import untraceable


def attention(
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Record nn.MultiheadAttention as the one function that it calls."""
    if module.training and module.dropout:
        raise untraceable(
            "nn.MultiheadAttention drops attention weights in train mode", instead_of("dropout")
        )
    if module.batch_first:
        # (N, T, E) to (T, N, E), and (T, E) to itself: there the two are one dimension.
        query, key, value = (given.transpose(0, -2) for given in (query, key, value))
    own: dict[str, Any] = {}
    if not module._qkv_same_embed_dim:
        own = {
            "use_separate_proj_weight": True,
            "q_proj_weight": module.q_proj_weight,
            "k_proj_weight": module.k_proj_weight,
            "v_proj_weight": module.v_proj_weight,
        }
    both: Any = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        module.out_proj.weight,
        module.out_proj.bias,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
        **own,
    )
    output = both[0].transpose(0, -2) if module.batch_first else both[0]
    return output, both[1] if need_weights else None


def encoder_layer(
    layer: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    """Record a layer as training computes it."""
    masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
    if layer.norm_first:
        src = src + layer._sa_block(layer.norm1(src), **masks, is_causal=is_causal)
        return src + layer._ff_block(layer.norm2(src))
    src = layer.norm1(src + layer._sa_block(src, **masks, is_causal=is_causal))
    return layer.norm2(src + layer._ff_block(src))


def encoder(
    encoder: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    """Record the layers of an encoder."""
    for layer in encoder.layers:
        src = layer(
            src,
            src_mask=mask,
            src_key_padding_mask=src_key_padding_mask,
            is_causal=bool(is_causal),
        )
    return src if encoder.norm is None else encoder.norm(src)
