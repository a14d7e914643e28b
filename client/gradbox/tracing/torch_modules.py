"""What is recorded of torch's own modules in place of what they do, by kind.

Most modules are traced through as they are. Those in `_INSTEAD` ask for a rank, which a symbol has
not, or call what no graph holds. While a function is traced, the methods named there are replaced
for the thread that traces it; for every other thread they are as before. A module that is not here
and asks for what a symbol cannot answer is refused where it asks.

Assertions. A module asks for a rank to check its argument; the box checks it instead (`of_rank`).

Normalisation. `nn.SyncBatchNorm` is recorded as batch norm over Z, which is whole on the box.
`nn.InstanceNorm1d` is recorded as it is for a batch, and asserts that there is one.

Weights that are computed from others in every call. Spectral norm in train mode runs a power
iteration under `torch.no_grad()` and writes it into the buffers u and v. Recorded, it is the same
iteration and the same writes: a loss that is called once leaves u and v as one call leaves them,
`result.loss_buffers` has them, and a module that is used twice in a loss iterates twice, as
locally. torch writes through `out=`, which no graph may hold. Weight norm and spectral norm have
two forms: a parametrization, and the hook that came before it (`nn.utils.spectral_norm`).

Attention. `nn.MultiheadAttention` asks whether there is a batch dimension; the function beneath it
asks again, so that call is recorded whole. What is recorded of `nn.TransformerEncoderLayer` is what
it computes with gradients: its fused inference kernels are not.

Losses that take a function.

Distributions. A density, an entropy or a divergence is traced through as it stands, and what torch
validates is asserted on the box.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import BackwardHook

from gradbox.tracing.current import TRACED
from gradbox.tracing.refusals import HOOKED, instead_of
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


def validate_sample(distribution: Distribution, value: Any) -> None:
    """Record that a value has the distribution's event shape and lies within its support."""
    try:
        support: Any = distribution.support
    except NotImplementedError:  # as torch does, but for its warning
        return
    name, event_shape = type(distribution).__name__, distribution.event_shape
    begin = len(value.size()) - len(event_shape)
    record_assertion(value.size()[begin:] == event_shape, f"{name}: expected another event shape")
    record_assertion(torch.all(support.check(value)), f"{name}: a value is outside its support")


def categorical(
    distribution: Any, probs: Any = None, logits: Any = None, validate_args: bool | None = None
) -> None:
    """Make a categorical distribution."""
    if (probs is None) == (logits is None):
        raise ValueError("Categorical: expected either probs or logits")
    if probs is not None:
        distribution.probs = distribution._param = probs / probs.sum(-1, keepdim=True)
    else:
        distribution.logits = distribution._param = logits - logits.logsumexp(-1, keepdim=True)
    sizes = distribution._param.size()
    distribution._num_events = sizes[-1]
    Distribution.__init__(distribution, sizes[:-1], validate_args=validate_args)


def sample(distribution: Distribution, sample_shape: Any) -> NoReturn:
    """Refuse a draw from a distribution."""
    raise untraceable(f"{type(distribution).__name__} draws a sample", instead_of("rand"))


_OWN_AUTOCAST: Final = torch.autocast.__init__


def autocast(context: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
    """Begin an autocast: refused in a readout, which runs in the model's own."""
    if TRACED.recording and TRACED.recording.structured:
        raise untraceable(
            "a readout switches autocast", "leave it out; precision= says how both are computed"
        )
    _OWN_AUTOCAST(context, device_type, *args, **kwargs)


def backward_hook(hook: BackwardHook, args: Any) -> NoReturn:
    """Refuse a module that changes gradients on their way back, which no graph shows."""
    raise untraceable(f"nn.{type(hook.module).__name__} has a backward hook", HOOKED)


def softmax_2d(module: nn.Softmax2d, input: Any) -> Any:
    """Record a softmax over channels."""
    of_rank(3, 4)(module, input)
    return F.softmax(input, -3)


# By class and method, what records the call.
_INSTEAD: Final[dict[tuple[type, str], Callable[..., Any]]] = {
    (nn.BatchNorm1d, "_check_input_dim"): of_rank(2, 3),
    (nn.SyncBatchNorm, "forward"): _BatchNorm.forward,
    (_InstanceNorm, "forward"): instance_norm,
    (_SpectralNorm, "_power_method"): power_method,
    (SpectralNorm, "compute_weight"): spectral_norm,
    (_WeightNorm, "forward"): weight_norm,
    (WeightNorm, "compute_weight"): weight_norm_of_hook,
    (nn.Softmax2d, "forward"): softmax_2d,
    (nn.MultiheadAttention, "forward"): attention,
    (nn.TransformerEncoderLayer, "forward"): encoder_layer,
    (nn.TransformerEncoder, "forward"): encoder,
    (nn.TripletMarginWithDistanceLoss, "forward"): triplet_with_distance,
    (BackwardHook, "setup_input_hook"): backward_hook,
    (torch.autocast, "__init__"): autocast,
    (Distribution, "_validate_sample"): validate_sample,
    (Distribution, "_extended_shape"): sample,
    (Categorical, "__init__"): categorical,
}


def recorded_modules() -> dict[tuple[type, str], Any]:
    """Return, by class and name, the methods by which a thread that traces records modules."""
    return {
        (kind, name): _while_tracing(getattr(kind, name), recorded)
        for (kind, name), recorded in _INSTEAD.items()
    }


def _while_tracing(original: Callable[..., Any], recorded: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (recorded if TRACED.recording else original)(*args, **kwargs)

    return call
