"""Losses that hold torch's own modules, by name: those that are recorded and those refused.

Together they hold every class of `torch.nn` but the abstract ones.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.spectral_norm import spectral_norm
from torch.nn.utils.weight_norm import weight_norm

from tests.graphs.module_losses import (
    DIMS,
    LABELS,
    SIGNS,
    TARGETS,
    Attention,
    Calling,
    D,
    Fused,
    Make,
    N,
    Recurrence,
    Twice,
    against,
    called,
    of_channels,
    of_shape,
    on_grids,
    parametrized,
    plain,
    transformer,
    unpooled,
)

ACTIVATIONS = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish "
    "PReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
)

RECORDED: dict[str, Make] = {
    **plain(ACTIVATIONS),
    **plain("GLU LogSoftmax Softmax Softmin", dim=1),
    "Threshold": lambda: nn.Threshold(0.1, 0.5),
    "Softmax2d": lambda: of_shape(2, 2, 2, module=nn.Softmax2d()),
    "Flatten": lambda: of_shape(2, 2, 2, module=nn.Flatten()),
    "dropout in eval mode": lambda: nn.Sequential(
        nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout()
    ).eval(),
    **{
        f"{name} in eval mode": lambda make=make: make().eval()
        for name, make in on_grids("Dropout").items()
    },  # type: ignore[misc]
    "dropout of nothing": lambda: nn.Dropout(0.0),
    # Linear, convolutions, pooling
    "Linear": lambda: nn.Linear(D, 3),
    "Bilinear": called("Bilinear", lambda module, z: module(z, z.flip(0)), D, D, 3),
    **of_channels("Conv", 3, 2),
    **of_channels("ConvTranspose", 3, 2, stride=2, padding=1, output_padding=1),
    "convolution of one size": lambda: of_shape(2, 4, module=nn.Conv1d(2, 3, 3, padding="same")),
    "circular convolution": lambda: of_shape(
        2, 4, module=nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular")
    ),
    "transposed convolution in groups": lambda: of_shape(
        4, 2, 1, module=nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), dilation=2, groups=2)
    ),
    **on_grids("AvgPool", 2),
    **on_grids("MaxPool", 2),
    **on_grids("AdaptiveAvgPool", 1),
    **on_grids("AdaptiveMaxPool", 1),
    **{
        f"LPPool{d}d": called(
            f"LPPool{d}d", lambda module, z, d=d: module(z.unflatten(1, DIMS[d]).exp()), 3, 2
        )
        for d in DIMS
    },
    **on_grids("ConstantPad", 1, 0.5),
    **on_grids("ReflectionPad", 1),
    **on_grids("ReplicationPad", 1),
    **on_grids("ZeroPad", 1),
    "ChannelShuffle": lambda: of_shape(4, 2, module=nn.ChannelShuffle(2)),
    "PixelShuffle": lambda: of_shape(4, 2, 1, module=nn.PixelShuffle(2)),
    "PixelUnshuffle": lambda: of_shape(2, 2, 2, module=nn.PixelUnshuffle(2)),
    "Unfold": lambda: of_shape(2, 2, 2, module=nn.Unfold(2)),
    "Fold": called("Fold", lambda module, z: module(z.reshape(2, 8, 3)), (2, 4), 2),
    **{
        name: lambda name=name: of_shape(2, 2, 2, module=getattr(nn, name)(scale_factor=2))  # type: ignore[misc]
        for name in "Upsample UpsamplingBilinear2d UpsamplingNearest2d".split()
    },
    # Normalisation
    **of_channels("BatchNorm"),
    **of_channels("InstanceNorm", affine=True, track_running_stats=True),
    "batch norm": lambda: nn.BatchNorm1d(D),
    "batch norm in eval mode": lambda: nn.BatchNorm1d(D).eval(),
    "batch norm without statistics": lambda: nn.BatchNorm1d(D, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(D),
    "a projector used twice": Twice,
    "LayerNorm": lambda: nn.LayerNorm(D),
    "GroupNorm": lambda: nn.GroupNorm(2, D),
    "RMSNorm": lambda: nn.RMSNorm(D),
    "LocalResponseNorm": lambda: of_shape(2, 2, 2, module=nn.LocalResponseNorm(2)),
    # Weights that are computed
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(D, 3)),
    "weight norm of a whole": lambda: parametrizations.weight_norm(nn.Linear(D, 3), dim=None),  # type: ignore[arg-type]
    "weight norm of columns": lambda: of_shape(
        2, 4, module=parametrizations.weight_norm(nn.ConvTranspose1d(2, 3, 2), dim=1)
    ),
    "weight norm by a hook": lambda: weight_norm(nn.Linear(D, 3)),
    "spectral norm": lambda: nn.Sequential(*[parametrizations.spectral_norm(nn.Linear(D, D))] * 2),
    "spectral norm in eval mode": lambda: parametrizations.spectral_norm(nn.Linear(D, 3)).eval(),
    "spectral norm of a transposed convolution": lambda: of_shape(
        2,
        4,
        module=parametrizations.spectral_norm(nn.ConvTranspose1d(2, 3, 2), n_power_iterations=3),
    ),
    "spectral norm by a hook": lambda: nn.Sequential(*[spectral_norm(nn.Linear(D, D))] * 2),
    "spectral norm by a hook, of columns": lambda: of_shape(
        2, 4, module=spectral_norm(nn.ConvTranspose1d(2, 3, 2))
    ),
    "an orthogonal weight": lambda: parametrizations.orthogonal(nn.Linear(D, 3)),
    "a weight of one's own": parametrized,
    "a pruned weight": lambda: prune.l1_unstructured(nn.Linear(D, 3), "weight", 2),
    # Attention
    "attention": lambda: Attention(batched=False),
    "attention with its batch first": lambda: Attention(batch_first=True),
    "attention without a batch": lambda: Attention(batched=False, batch_first=True),
    "attention with more keys": lambda: Attention(add_bias_kv=True, add_zero_attn=True),
    "attention of other widths": lambda: Attention(kdim=D, vdim=D, batch_first=True),
    "attention under a mask": lambda: Attention(
        batch_first=True, mask=torch.tensor([[False] * (N - 1) + [True]])
    ),
    "attention in eval mode": lambda: Attention(dropout=0.5, batch_first=True).eval(),
    "attention as a function": Fused,
    "a transformer layer": lambda: transformer("Encoder"),
    "a transformer's encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, dropout=0.5, norm_first=True),
        2,
        norm=nn.LayerNorm(D),
        enable_nested_tensor=False,
    ).eval(),
    "a decoder's layer": lambda: Calling(
        transformer("Decoder"), lambda module, z: module(z, z.flip(0))
    ),
    # Lookup
    "Embedding": called("Embedding", lambda module, z: module(LABELS) * z[:, :4], D, 4),
    "a sparse embedding": called(
        "Embedding", lambda module, z: module(LABELS) * z[:, :4], D, 4, sparse=True
    ),
    # Losses and distances
    **against("BCEWithLogitsLoss MSELoss L1Loss SmoothL1Loss HuberLoss PoissonNLLLoss", TARGETS),
    **against("KLDivLoss MultiLabelSoftMarginLoss", TARGETS),
    **against("SoftMarginLoss HingeEmbeddingLoss", SIGNS),
    **against("CrossEntropyLoss MultiMarginLoss NLLLoss", LABELS),
    **against("MultiLabelMarginLoss", torch.tensor([[1, 2, *[-1] * 6]] * N)),
    "BCELoss": called("BCELoss", lambda module, z: module(z.sigmoid(), TARGETS)),
    "GaussianNLLLoss": called("GaussianNLLLoss", lambda module, z: module(z, TARGETS, z.exp())),
    "NLLLoss2d": called(
        "NLLLoss2d",
        lambda module, z: module(
            z.reshape(N, 4, 2, 1),
            LABELS.reshape(N, 1, 1) % 4 * torch.ones(N, 2, 1, dtype=torch.long),
        ),
    ),
    "CTCLoss": called(
        "CTCLoss",
        lambda module, z: module(
            z[:, None].log_softmax(-1),
            torch.tensor([[1, 2, 2]]),
            torch.tensor([N]),
            torch.tensor([3]),
        ),
    ),
    **{
        name: called(name, lambda module, z: module(z, z.flip(0)))
        for name in "CosineSimilarity PairwiseDistance".split()
    },
    "CosineEmbeddingLoss": called(
        "CosineEmbeddingLoss", lambda module, z: module(z, z.flip(0), SIGNS[:, 0])
    ),
    "MarginRankingLoss": called("MarginRankingLoss", lambda module, z: module(z, z.flip(0), SIGNS)),
    "TripletMarginLoss": called(
        "TripletMarginLoss", lambda module, z: module(z, z.flip(0), z.roll(1, 0))
    ),
    "TripletMarginWithDistanceLoss": called(
        "TripletMarginWithDistanceLoss",
        lambda module, z: module(z, z.flip(0), z.roll(1, 0)),
        distance_function=lambda a, b: (a - b).abs().sum(-1),
        swap=True,
    ),
    # Containers
    "ModuleList": lambda: Calling(nn.ModuleList([nn.Linear(D, 3)]), lambda m, z: m[0](z)),
    "ModuleDict": lambda: Calling(nn.ModuleDict({"a": nn.Linear(D, 3)}), lambda m, z: m["a"](z)),
    "ParameterList": lambda: Calling(nn.ParameterList([torch.ones(D)]), lambda m, z: z * m[0]),
    "ParameterDict": lambda: Calling(
        nn.ParameterDict({"a": torch.ones(D)}), lambda m, z: z * m["a"]
    ),
}
NOT_RECORDED: dict[str, Make] = {
    **{
        name: lambda name=name: Recurrence(getattr(nn, name)(4, 3))  # type: ignore[misc]
        for name in "RNN GRU LSTM".split()
    },
    **{
        name: lambda name=name: getattr(nn, name)(D, 3)  # type: ignore[misc]
        for name in "RNNCell GRUCell LSTMCell".split()
    },
    "Transformer": called("Transformer", lambda module, z: module(z, z), D, 2, 1, 1, 16),
    "TransformerDecoder": lambda: Calling(
        nn.TransformerDecoder(transformer("Decoder"), 2),  # type: ignore[arg-type]
        lambda module, z: module(z, z),
    ),
    "EmbeddingBag": called("EmbeddingBag", lambda module, z: module(LABELS[None]) * z, 5, 4),
    "AdaptiveLogSoftmaxWithLoss": called(
        "AdaptiveLogSoftmaxWithLoss", lambda module, z: module(z, LABELS % 5).loss, D, 9, [2, 4, 6]
    ),
    **{f"MaxUnpool{d}d": unpooled(d) for d in DIMS},
    **on_grids("FractionalMaxPool", 2, dims=(2, 3), output_size=1),
    **on_grids("CircularPad", 1),
    "CrossMapLRN2d": lambda: of_shape(2, 2, 2, module=nn.CrossMapLRN2d(3)),
    "DataParallel": lambda: nn.DataParallel(nn.Linear(D, 3)),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # new in torch 2.13
    NOT_RECORDED["LinearCrossEntropyLoss"] = called(
        "LinearCrossEntropyLoss", lambda module, z: module(z, LABELS % 5), D, 5, bias=True
    )

# By the name of the class, what makes one, and what the message says to do. docs/graphs.md has the
# same names.
REFUSED: dict[str, tuple[Make, str]] = {
    **{name: (make, "client.model(...)") for name, make in NOT_RECORDED.items()},
    **{
        name: (make, "call .eval() on it")
        for name, make in {
            **plain("Dropout AlphaDropout FeatureAlphaDropout"),
            **on_grids("Dropout"),
        }.items()
    },
    "RReLU": (nn.RReLU, "loss_inputs"),
    "LazyLinear": (lambda: nn.LazyLinear(3), "call it once"),
    **{
        name: (make, "call it once")
        for kind in ("Conv", "ConvTranspose")
        for name, make in on_grids(f"Lazy{kind}", 3, 2).items()
    },
    **{
        name: (make, "call it once")
        for kind in ("BatchNorm", "InstanceNorm")
        for name, make in on_grids(f"Lazy{kind}", affine=True).items()
    },
}

# They have no forward.
ABSTRACT = {"Container", "Module", "RNNBase", "RNNCellBase"}
