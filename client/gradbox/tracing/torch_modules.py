"""Modules of torch's own whose `forward` branches on its argument's shape, recorded without that.

A symbol has no rank. `nn.BatchNorm1d` asks for it only to check it, which is recorded as an
assertion for the box. `nn.MultiheadAttention` asks whether there is a batch dimension; the function
beneath it asks again, so that call is recorded whole. `nn.InstanceNorm` is recorded as it is for a
batch, and asserts that there is one; so are `nn.RNN`, `nn.GRU` and `nn.LSTM`, each as one call.
What is recorded is what each computes with gradients: the fused inference kernels of
`nn.TransformerEncoderLayer` are not.

`nn.BatchNorm1d(momentum=None)` divides by a count that is a symbol, so its running statistics are
recorded as the formula that they are. `nn.SyncBatchNorm` is recorded as batch norm over Z, which is
whole on the box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradbox.tracing.refusals import instead_of
from gradbox.tracing.source_location import untraceable


@contextmanager
def recorded_modules() -> Iterator[None]:
    """Let these modules be recorded; without a symbol among their arguments they are as before."""
    before = [(kind, name, vars(kind).get(name)) for kind, name in _INSTEAD]
    for (kind, name), recorded in _INSTEAD.items():
        setattr(kind, name, _for_symbols(getattr(kind, name), recorded))
    try:
        yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method) if method is not None else delattr(kind, name)


def _for_symbols(original: Callable[..., Any], recorded: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return recorded(module, *args, **kwargs)
        return original(module, *args, **kwargs)

    return call


def _of_rank(*ranks: int) -> Callable[..., None]:
    """Return what records that the argument of a module has one of these numbers of dimensions."""

    def check(module: nn.Module, input: Any) -> None:
        holds = input.dim() == ranks[0]
        for rank in ranks[1:]:
            holds = holds | (input.dim() == rank)
        expected = " or ".join(f"{rank}D" for rank in ranks)
        _assert(holds, f"{type(module).__name__}: expected {expected} input")

    return check


def _assert(holds: Any, message: str) -> None:
    """Record an assertion."""
    torch._assert(holds, message)  # type: ignore[no-untyped-call]


def _softmax_2d(module: nn.Softmax2d, input: Any) -> Any:
    _of_rank(3, 4)(module, input)
    return F.softmax(input, -3)


def _instance_norm(module: Any, input: Any) -> Any:
    _of_rank(module._get_no_batch_dim() + 1)(module, input)
    if module.affine:
        message = f"{type(module).__name__}: expected {module.num_features} channels"
        _assert(input.size(1) == module.num_features, message)
    return module._apply_instance_norm(input)


def _batch_norm(module: Any, input: Any) -> Any:
    averages = module.training and module.track_running_stats and module.momentum is None
    if not averages:
        return _OWN_BATCH_NORM(module, input)
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    channels = input.detach().movedim(1, 0).flatten(1)
    for running, of_batch in (
        (module.running_mean, channels.mean(1)),
        (module.running_var, channels.var(1)),
    ):
        running.add_((of_batch - running) / module.num_batches_tracked)
    return F.batch_norm(input, None, None, module.weight, module.bias, True, 0.0, module.eps)


def _recurrent(module: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
    if module.training and module.dropout:
        raise untraceable(
            f"nn.{type(module).__name__} drops what goes from layer to layer in train mode",
            instead_of("dropout"),
        )
    _of_rank(3)(module, input)
    if hx is None:
        rows = module.num_layers * (2 if module.bidirectional else 1)
        batch = input.size(0 if module.batch_first else 1)
        hx = input.new_zeros((rows, batch, module.proj_size or module.hidden_size))
        if module.mode == "LSTM":
            hx = (hx, input.new_zeros((rows, batch, module.hidden_size)))
    found: Any = _RECURRENT[module.mode](
        input,
        hx,
        [getattr(module, name) for name in module._flat_weights_names],
        module.bias,
        module.num_layers,
        0.0,
        module.training,
        module.bidirectional,
        module.batch_first,
    )
    return found[0], (found[1], found[2]) if module.mode == "LSTM" else found[1]


def _attention(
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


def _encoder_layer(
    layer: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
    if layer.norm_first:
        src = src + layer._sa_block(layer.norm1(src), **masks, is_causal=is_causal)
        return src + layer._ff_block(layer.norm2(src))
    src = layer.norm1(src + layer._sa_block(src, **masks, is_causal=is_causal))
    return layer.norm2(src + layer._ff_block(src))


def _encoder(
    encoder: nn.TransformerEncoder,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool | None = None,
) -> Any:
    for layer in encoder.layers:
        src = layer(
            src,
            src_mask=mask,
            src_key_padding_mask=src_key_padding_mask,
            is_causal=bool(is_causal),
        )
    return src if encoder.norm is None else encoder.norm(src)


_OWN_BATCH_NORM: Final = _BatchNorm.forward
_RECURRENT: Final[dict[str, Callable[..., Any]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}

# By class and method, what records the call.
_INSTEAD: Final[dict[tuple[type[nn.Module], str], Callable[..., Any]]] = {
    (nn.BatchNorm1d, "_check_input_dim"): _of_rank(2, 3),
    (nn.BatchNorm2d, "_check_input_dim"): _of_rank(4),
    (nn.BatchNorm3d, "_check_input_dim"): _of_rank(5),
    (nn.SyncBatchNorm, "_check_input_dim"): _of_rank(2, 3, 4, 5),
    (nn.SyncBatchNorm, "forward"): _batch_norm,
    (_BatchNorm, "forward"): _batch_norm,
    (nn.CircularPad1d, "_check_input_dim"): _of_rank(2, 3),
    (nn.CircularPad2d, "_check_input_dim"): _of_rank(3, 4),
    (nn.CircularPad3d, "_check_input_dim"): _of_rank(4, 5),
    (nn.Softmax2d, "forward"): _softmax_2d,
    (_InstanceNorm, "forward"): _instance_norm,
    (nn.RNN, "forward"): _recurrent,
    (nn.GRU, "forward"): _recurrent,
    (nn.LSTM, "forward"): _recurrent,
    (nn.MultiheadAttention, "forward"): _attention,
    (nn.TransformerEncoderLayer, "forward"): _encoder_layer,
    (nn.TransformerEncoder, "forward"): _encoder,
}
