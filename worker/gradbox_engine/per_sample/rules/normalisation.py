"""Normalisation layers: y = x̂ · weight + bias, where x̂ has no parameter of its own.

So the weight's row is Σ g · x̂ and the bias's Σ g over a sample's positions, whatever made x̂: the
same function is called once more without weight and bias.

Shapes: B samples, Y outputs, M images a sample, C channels, L positions of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.per_sample.rules.rule import Layer, Rule, Targets
from gradbox_factors import Block, Term

Normalise = Callable[[Tensor], Tensor]


def _normalised(layer: Layer) -> Tensor:
    normalise: Normalise = layer.detail[0]
    return normalise(layer.input.detach())


def _bind_layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    shape = tuple(normalized_shape)
    return Layer(
        input,
        {"weight": weight, "bias": bias},
        detail=(lambda x: F.layer_norm(x, shape, None, None, eps), len(shape)),
        first_dims=input.dim() - len(shape),
    )


def _bind_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Layer:
    shape = tuple(normalized_shape)
    return Layer(
        input,
        {"weight": weight},
        detail=(lambda x: F.rms_norm(x, shape, None, eps), len(shape)),
        first_dims=input.dim() - len(shape),
    )


def _feature_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    """The normalised dims are last; the dims between the samples and these are summed."""
    features = x.shape[x.dim() - layer.detail[1] :]
    g = g.reshape(*g.shape[:2], -1, *features)
    if weight := targets.get("weight"):
        x_hat = x.reshape(x.shape[0], -1, *features)
        yield Block(weight.name, weight.shape, (g * x_hat).sum(2).transpose(0, 1))
    if bias := targets.get("bias"):
        yield Block(bias.name, bias.shape, g.sum(2).transpose(0, 1))


def _bind_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Layer:
    return Layer(
        input,
        {"weight": weight, "bias": bias},
        detail=(lambda x: F.group_norm(x, num_groups, None, None, eps),),
    )


def _bind_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer:
    means = None if use_input_stats else running_mean
    variances = None if use_input_stats else running_var
    return Layer(
        input,
        {"weight": weight, "bias": bias},
        detail=(
            lambda x: F.instance_norm(
                x, means, variances, None, None, use_input_stats, momentum, eps
            ),
        ),
    )


def _bind_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Layer | None:
    if training or running_mean is None:
        return None  # couples the samples: the probe runs raise CoupledSamples
    return Layer(
        input,
        {"weight": weight, "bias": bias},
        detail=(
            lambda x: F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps),
        ),
    )


def _channel_terms(layer: Layer, x: Tensor, g: Tensor, targets: Targets) -> Iterator[Term]:
    """Dims are images, channels, then positions, if any."""
    channels = layer.input.shape[1]
    B, Y = x.shape[0], g.shape[0]
    g = g.reshape(Y, B, -1, channels, layer.input[0, 0].numel())
    if weight := targets.get("weight"):
        x_hat = x.reshape(g.shape[1:])
        yield Block(weight.name, weight.shape, _contracted(g, x_hat))
    if bias := targets.get("bias"):
        yield Block(bias.name, bias.shape, g.sum(4).sum(2).transpose(0, 1))


def _contracted(g: Tensor, x_hat: Tensor) -> Tensor:
    """Return Σ_{m, l} g[y, b, m, c, l] x̂[b, m, c, l], shape (B, Y, C)."""
    Y, B, M, C, L = g.shape
    if Y == 1:
        return (g[0] * x_hat).sum(3).sum(1)[:, None]
    # x̂ on the left and all outputs on the right: the other way round, and output by output, BLAS
    # takes ten times as long.
    right = g.reshape(Y, -1, L).permute(1, 2, 0)
    products = torch.bmm(x_hat.reshape(-1, 1, L), right)
    return products.view(B, M, C, Y).sum(1).transpose(1, 2)


_RMS_NORM = Rule("rms_norm", _bind_rms_norm, _feature_terms, _normalised)

RULES: dict[Callable[..., Any], Rule] = {
    F.layer_norm: Rule("layer_norm", _bind_layer_norm, _feature_terms, _normalised),
    F.rms_norm: _RMS_NORM,
    torch.rms_norm: _RMS_NORM,
    F.group_norm: Rule("group_norm", _bind_group_norm, _channel_terms, _normalised),
    F.instance_norm: Rule("instance_norm", _bind_instance_norm, _channel_terms, _normalised),
    F.batch_norm: Rule("batch_norm", _bind_batch_norm, _channel_terms, _normalised),
}
