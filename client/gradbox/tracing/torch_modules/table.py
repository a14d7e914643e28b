"""Which modules are recorded by a function of their own, and how it takes its place.

While a function is traced, the methods named here are replaced for the thread that traces it; for
every other thread they are as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import (
    Categorical,
    Distribution,
    Gamma,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    MultivariateNormal,
    TransformedDistribution,
    Wishart,
)
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.conv import _ConvTransposeNd, _LazyConvXdMixin
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import BackwardHook

from gradbox.tracing.current import TRACED
from gradbox.tracing.torch_modules import distributions, formulas, refused
from gradbox.tracing.torch_modules.formulas import of_rank


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


def _softmax_2d(module: nn.Softmax2d, input: Any) -> Any:
    of_rank(3, 4)(module, input)
    return F.softmax(input, -3)


_DROPOUTS: Final[tuple[Any, ...]] = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

# What a symbol cannot answer in them would take a formula of their own.
_NOT_RECORDED: Final[tuple[tuple[type, str], ...]] = (
    (nn.RNN, "forward"),
    (nn.GRU, "forward"),
    (nn.LSTM, "forward"),
    (nn.RNNCell, "forward"),
    (nn.GRUCell, "forward"),
    (nn.LSTMCell, "forward"),
    (nn.Transformer, "forward"),
    (nn.TransformerDecoder, "forward"),
    (nn.EmbeddingBag, "forward"),
    (nn.AdaptiveLogSoftmaxWithLoss, "forward"),
    (nn.AdaptiveLogSoftmaxWithLoss, "log_prob"),
    (nn.MaxUnpool1d, "forward"),
    (nn.MaxUnpool2d, "forward"),
    (nn.MaxUnpool3d, "forward"),
)

# By class and method, what records the call.
_INSTEAD: Final[dict[tuple[type, str], Callable[..., Any]]] = {
    (nn.BatchNorm1d, "_check_input_dim"): of_rank(2, 3),
    (nn.BatchNorm2d, "_check_input_dim"): of_rank(4),
    (nn.BatchNorm3d, "_check_input_dim"): of_rank(5),
    (nn.SyncBatchNorm, "_check_input_dim"): of_rank(2, 3, 4, 5),
    (nn.SyncBatchNorm, "forward"): formulas.batch_norm,
    (_BatchNorm, "forward"): formulas.batch_norm,
    (_InstanceNorm, "forward"): formulas.instance_norm,
    (_SpectralNorm, "_power_method"): formulas.power_method,
    (SpectralNorm, "compute_weight"): formulas.spectral_norm,
    (_WeightNorm, "forward"): formulas.weight_norm,
    (WeightNorm, "compute_weight"): formulas.weight_norm_of_hook,
    (nn.CircularPad1d, "_check_input_dim"): of_rank(2, 3),
    (nn.CircularPad2d, "_check_input_dim"): of_rank(3, 4),
    (nn.CircularPad3d, "_check_input_dim"): of_rank(4, 5),
    (nn.Softmax2d, "forward"): _softmax_2d,
    (nn.MultiheadAttention, "forward"): formulas.attention,
    (nn.TransformerEncoderLayer, "forward"): formulas.encoder_layer,
    (nn.TransformerEncoder, "forward"): formulas.encoder,
    (_ConvTransposeNd, "_output_padding"): formulas.output_padding,
    (nn.TripletMarginWithDistanceLoss, "forward"): formulas.triplet_with_distance,
    (torch.autocast, "__init__"): refused.autocast(torch.autocast.__init__),
    (Distribution, "_validate_sample"): distributions.validate_sample,
    (Categorical, "__init__"): distributions.categorical,
    (MixtureSameFamily, "__init__"): distributions.mixture,
    (TransformedDistribution, "__init__"): distributions.transformed,
    (Gamma, "log_prob"): distributions.log_prob_of_gamma,
    (Distribution, "_extended_shape"): refused.sample,
    (LowRankMultivariateNormal, "__init__"): refused.matrix_distribution,
    (MultivariateNormal, "__init__"): refused.matrix_distribution,
    (Wishart, "__init__"): refused.matrix_distribution,
    **{(kind, "forward"): refused.dropout(kind.forward) for kind in _DROPOUTS},
    (nn.RReLU, "forward"): refused.rrelu,
    (BackwardHook, "setup_input_hook"): refused.backward_hook,
    **dict.fromkeys(_NOT_RECORDED, refused.not_recorded),
    (nn.FractionalMaxPool2d, "forward"): refused.fractional_pooling,
    (nn.FractionalMaxPool3d, "forward"): refused.fractional_pooling,
    (nn.DataParallel, "forward"): refused.several_devices,
    (nn.CrossMapLRN2d, "forward"): refused.cross_map_norm,
    (nn.LazyLinear, "initialize_parameters"): refused.not_initialised,
    (_LazyConvXdMixin, "initialize_parameters"): refused.not_initialised,
    (_LazyNormBase, "initialize_parameters"): refused.not_initialised,
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.12 and older have none
    _INSTEAD[nn.LinearCrossEntropyLoss, "forward"] = formulas.linear_cross_entropy
