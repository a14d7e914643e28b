"""What is recorded of torch's own modules in place of what they do, by kind.

Assertions. A module asks for a rank to check its argument; the box checks it instead (`of_rank`).

Normalisation. `nn.BatchNorm1d` asks for a rank only to check it. With `momentum=None` it divides by
a count that is a symbol, so its running statistics are recorded as the formula that they are.
`nn.SyncBatchNorm` is recorded as batch norm over Z, which is whole on the box. `nn.InstanceNorm1d`
is recorded as it is for a batch, and asserts that there is one.

Weights that are computed from others in every call. Spectral norm in train mode runs a power
iteration under `torch.no_grad()` and writes it into the buffers u and v. Recorded, it is the same
iteration and the same writes: a loss that is called once leaves u and v as one call leaves them,
`result.loss_buffers` has them, and a module that is used twice in a loss iterates twice, as
locally. torch writes through `out=`, which no graph may hold. Weight norm and spectral norm have
two forms: a parametrization, and the hook that came before it (`nn.utils.spectral_norm`).

Attention. `nn.MultiheadAttention` asks whether there is a batch dimension; the function beneath it
asks again, so that call is recorded whole. What is recorded of `nn.TransformerEncoderLayer` is what
it computes with gradients: its fused inference kernels are not.

Convolution: the size that a transposed one is asked for, which it compares with its argument's.

Losses that take a function, or have another way to their value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradbox.tracing.refusals import instead_of
from gradbox.tracing.source_location import untraceable


def of_rank(*ranks: int) -> Callable[..., None]:
    """Return what records that the argument of a module has one of these numbers of dimensions."""

    def check(module: nn.Module, input: Any) -> None:
        holds = input.dim() == ranks[0]
        for rank in ranks[1:]:
            holds = holds | (input.dim() == rank)
        expected = " or ".join(f"{rank}D" for rank in ranks)
        record_assertion(holds, f"{type(module).__name__}: expected {expected} input")

    return check


def record_assertion(holds: Any, message: str) -> None:
    """Record an assertion."""
    torch._assert(holds, message)  # type: ignore[no-untyped-call]


_OWN_BATCH_NORM: Final = _BatchNorm.forward


def batch_norm(module: Any, input: Any) -> Any:
    """Record a batch norm of any number of dimensions."""
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


def instance_norm(module: Any, input: Any) -> Any:
    """Record an instance norm of a batch."""
    of_rank(module._get_no_batch_dim() + 1)(module, input)
    if module.affine:
        message = f"{type(module).__name__}: expected {module.num_features} channels"
        record_assertion(input.size(1) == module.num_features, message)
    return module._apply_instance_norm(input)


def power_method(module: Any, weight_mat: Any, n_power_iterations: int) -> None:
    """Record the power iteration of a parametrization: u from v, then v from u."""
    with torch.no_grad():
        for _ in range(n_power_iterations):
            _write(module._u, torch.mv(weight_mat, module._v), module.eps)
            _write(module._v, torch.mv(weight_mat.H, module._u), module.eps)


def spectral_norm(hook: Any, module: nn.Module, do_power_iteration: bool) -> Any:
    """Record the weight of the older form, whose iteration begins with v."""
    weight, u, v = (getattr(module, f"{hook.name}_{part}") for part in ("orig", "u", "v"))
    matrix = hook.reshape_weight_to_matrix(weight)
    if do_power_iteration:
        with torch.no_grad():
            for _ in range(hook.n_power_iterations):
                _write(v, torch.mv(matrix.t(), u), hook.eps)
                _write(u, torch.mv(matrix, v), hook.eps)
    # Copies: a second call writes into u and v before the backward of the first.
    return weight / torch.dot(u.clone(), torch.mv(matrix, v.clone()))


def weight_norm(module: Any, weight_g: Any, weight_v: Any) -> Any:
    """Record g v / |v|, the norm over all dimensions but one, or over all where that is -1."""
    rows = weight_v if module.dim == -1 else weight_v.movedim(module.dim, 0)
    norms = rows.reshape((weight_g.numel(), -1)).norm(2, 1).reshape(weight_g.shape)
    return weight_v * (weight_g / norms)


def weight_norm_of_hook(hook: Any, module: nn.Module) -> Any:
    """Record the weight of the older form."""
    g, v = (getattr(module, f"{hook.name}_{part}") for part in ("g", "v"))
    return weight_norm(hook, g, v)


def _write(buffer: Tensor, value: Any, eps: float) -> None:
    buffer.copy_(F.normalize(value, dim=0, eps=eps))


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


def output_padding(
    module: Any,
    input: Any,
    output_size: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    kernel_size: Sequence[int],
    num_spatial_dims: int,
    dilation: Sequence[int],
) -> list[Any]:
    """Record how much longer than its smallest the output is made along each dimension.

    With `output_size` it is between 0 and the stride: from the smallest size s (n - 1) + d (k - 1)
    + 1 - 2 p on, n being the argument's size, k the kernel's, s stride, d dilation, p padding.
    """
    if output_size is None:
        return list(module.output_padding)
    found = []
    for d in range(num_spatial_dims):
        last = d - num_spatial_dims
        reach = dilation[d] * (kernel_size[d] - 1) + 1
        smallest = (input.size(last) - 1) * stride[d] + reach - 2 * padding[d]
        more = output_size[last] - smallest
        message = f"{type(module).__name__}: expected an output_size within one stride of its size"
        record_assertion((more >= 0) & (more < stride[d]), message)
        found.append(more)
    return found


def linear_cross_entropy(module: nn.LinearCrossEntropyLoss, input: Any, target: Any) -> Any:
    """Record the cross entropy of a linear layer; `options` save memory and change no value."""
    logits = module.linear(input)
    if module.out_features:
        logits = logits.unflatten(-1, (module.num_classes, *module.out_features))
    return _cross_entropy(
        logits,
        target,
        weight=module.weight,
        ignore_index=module.ignore_index,
        reduction=module.reduction,
        label_smoothing=module.label_smoothing,
    )


def cross_entropy_of_linear(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    options: Any = None,
    **more: Any,
) -> Any:
    """Record `linear_cross_entropy` for a weight of two dimensions."""
    two = linear_weight.dim() == 2
    record_assertion(two, "linear_cross_entropy: expected a linear_weight of two dimensions")
    return _cross_entropy(F.linear(input, linear_weight, linear_bias), target, **more)


def _cross_entropy(
    logits: Any, target: Any, *, ignore_index: int | None = None, **more: Any
) -> Any:
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, ignore_index=ignored, **more)


def triplet_with_distance(
    module: nn.TripletMarginWithDistanceLoss, anchor: Any, positive: Any, negative: Any
) -> Any:
    """Record the triplet loss over a distance function."""
    return triplet(
        anchor,
        positive,
        negative,
        distance_function=module.distance_function,
        margin=module.margin,
        swap=module.swap,
        reduction=module.reduction,
    )


def triplet(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Any = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """Record `triplet_margin_with_distance_loss`; the distance function is traced through."""
    one_rank = (anchor.dim() == positive.dim()) & (anchor.dim() == negative.dim())
    record_assertion(one_rank, "triplet_margin_with_distance_loss: expected three of one rank")
    distance = distance_function or torch.pairwise_distance
    to_negative = distance(anchor, negative)
    if swap:
        to_negative = torch.minimum(to_negative, distance(positive, negative))
    loss: Any = torch.clamp_min(margin + distance(anchor, positive) - to_negative, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


# By function, what records a call of it.
FORMULAS: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    F.triplet_margin_with_distance_loss: triplet,
    torch._is_all_true: torch.all,
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.12 and older have none
    FORMULAS[F.linear_cross_entropy] = cross_entropy_of_linear
