"""The problem table: models × losses × modes, in float64.

Every part of gradbox that returns gradients answers these; `tests.oracle` knows the answers. Each
entry of CASES is a callable without arguments, so that nobody can change another's data. Torch and
the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import case_models as models

Shards = list[dict[str, Tensor]]

DATA_SEED = 11


@dataclass(frozen=True)
class Case:
    """One problem. `groups` go to the loss by name, or as its first argument where there is one."""

    model: Callable[[], nn.Module]
    groups: dict[str, Shards]
    loss: Callable[..., Tensor]
    loss_inputs: dict[str, Tensor] = field(default_factory=dict)
    mode: Literal["eval", "train"] = "train"
    seed: int = 3
    wrt: Sequence[str] | None = None
    output: str | int | None = None
    readout: Callable[[Any, dict[str, Tensor]], Any] | None = None
    methods: dict[str, str] = field(default_factory=dict)  # by group; forward where none is named

    @property
    def loss_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable numbers of the loss itself, as `loss.NAME`."""
        if not isinstance(self.loss, nn.Module):
            return {}
        return {f"loss.{name}": p for name, p in self.loss.named_parameters()}


# --- losses: each couples all samples ----------------------------------------------------------


def spread(z: Tensor) -> Tensor:
    """Mean over all pairs of a bounded repulsion."""
    return torch.exp(-torch.cdist(z, z).square()).mean()


def whitening(z: Tensor) -> Tensor:
    """Squared distance of the samples' covariance from the identity, summed."""
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (z.shape[0] - 1)
    return (covariance - torch.eye(z.shape[1], dtype=z.dtype, device=z.device)).square().sum()


def supervised(z: Tensor, labels: Tensor, temperature: float = 0.5) -> Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, eq. 2)."""
    z = F.normalize(z, dim=-1)
    others = ~torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    log_p = (z @ z.T / temperature).masked_fill(~others, -1e9).log_softmax(-1)
    same = (labels[:, None] == labels[None, :]) & others
    return -(log_p * same).sum() / same.sum()


def ranked(z: Tensor) -> Tensor:
    """Squared distance of the sorted sums from an even grid, averaged."""
    sums = z.flatten(1).sum(1).sort().values
    grid = torch.linspace(-1, 1, z.shape[0], dtype=z.dtype, device=z.device)
    return (sums - grid).square().mean()


def log_sum(z: Tensor) -> Tensor:
    """A loss over one number for each shard."""
    return z.logsumexp(0) + z.square().sum()


def of_parts(z: dict[str, Tensor]) -> Tensor:
    """A loss over a readout's dict."""
    return spread(z["first"]) + whitening(z["mean"])


class LearnedTemperature(nn.Module):
    """CLIP's symmetric loss with its logarithmic temperature (Radford et al. 2021, figure 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        scores = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T * self.log_scale.exp()
        target = torch.arange(images.shape[0], device=images.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


# --- data --------------------------------------------------------------------------------------


def _normal(sizes: Sequence[int], *shape: int, name: str = "0", seed: int = DATA_SEED) -> Shards:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(size, *shape, generator=generator, dtype=torch.float64)}
        for size in sizes
    ]


def _tokens(sizes: Sequence[int], lengths: Sequence[int]) -> Shards:
    generator = torch.Generator().manual_seed(DATA_SEED)
    shards = []
    for size, length in zip(sizes, lengths, strict=True):
        tokens = torch.randint(0, 11, (size, length), generator=generator)
        mask = torch.arange(length) < torch.randint(2, length + 1, (size, 1), generator=generator)
        shards.append({"tokens": tokens, "mask": mask})
    return shards


def _masked_mean(hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask_BT1 = inputs["mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask_BT1).sum(1) / mask_BT1.sum(1)


def _first_and_mean(hidden: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"first": hidden[:, 0], "mean": _masked_mean(hidden, inputs)}


RAGGED = (4, 4, 4, 2)


def _plain(model: Callable[[], nn.Module], **terms: Any) -> Callable[[], Case]:
    """A model that takes (B, 5) and returns (B, D)."""
    return lambda: Case(model, {"z": _normal(RAGGED, 5)}, **({"loss": spread} | terms))


def _towers(**terms: Any) -> Case:
    groups = {
        "images": _normal((3, 3, 1), 6, name="pixels"),
        "texts": _normal((5, 2), 4, name="features", seed=5),
    }
    methods = {"images": "encode_image", "texts": "encode_text"}
    return Case(models.towers, groups, LearnedTemperature(), methods=methods, **terms)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": _plain(models.mlp),
    "mlp, one shard": lambda: Case(models.mlp, {"z": _normal((6,), 5)}, whitening),
    "mlp, one sample": lambda: Case(models.mlp, {"z": _normal((1,), 5)}, ranked),
    "mlp, shards of one": lambda: Case(models.mlp, {"z": _normal((1,) * 5, 5)}, whitening),
    "mlp, a sum": _plain(models.mlp, loss=whitening),
    "mlp, labels": _plain(
        models.mlp, loss=supervised, loss_inputs={"labels": torch.arange(14) % 3}
    ),
    "mlp, some layers": _plain(models.mlp, wrt=["2.*", "4.bias"]),
    "in-place activations": _plain(models.inplace_mlp),
    "cnn in train": lambda: Case(models.cnn, {"z": _normal(RAGGED, 2, 6, 6)}, whitening),
    "cnn in eval": lambda: Case(models.cnn, {"z": _normal(RAGGED, 2, 6, 6)}, spread, mode="eval"),
    "average in place": _plain(models.average_in_place),
    "average by .data": _plain(models.average_by_data),
    "average rebound": _plain(models.average_rebound),
    "average saved": _plain(models.saves_its_average, loss=whitening),
    "spectral norm": _plain(models.spectral, loss=whitening),
    "classic spectral norm": _plain(models.classic_spectral, loss=whitening),
    "transformer": lambda: Case(
        models.transformer,
        {"z": _tokens((3, 3, 2), (5, 7, 4))},
        spread,
        output="hidden",
        readout=_masked_mean,
    ),
    "transformer, tied logits": lambda: Case(
        models.transformer, {"z": _tokens((3, 3, 2), (5, 5, 5))}, ranked, output="logits"
    ),
    "transformer, nested output": lambda: Case(
        models.transformer, {"z": _tokens((3, 2), (5, 5))}, ranked, output="layers.0"
    ),
    "transformer, a dict of parts": lambda: Case(
        models.transformer,
        {"z": _tokens((3, 3, 2), (5, 7, 4))},
        of_parts,
        output="hidden",
        readout=_first_and_mean,
    ),
    "lstm": lambda: Case(models.recurrent, {"z": _normal((3, 3, 2), 5, 4)}, ranked, output=0),
    "two towers": _towers,
    "two towers, one of them": lambda: _towers(wrt=["texts.*"]),
    "layer drop by random": _plain(models.layer_drop),
    "layer drop by numpy": _plain(models.numpy_drop),
    "one number a shard": _plain(models.scalars, loss=log_sum),
    "frozen stem": _plain(models.frozen, wrt=["head.*"]),
    "unused branch": _plain(models.frozen),
}


def smooth(name: str) -> Case:
    """Return a case whose loss has a second derivative, which `torch.cdist` in `spread` has not."""
    case = CASES[name]()
    return replace(case, loss=whitening) if case.loss is spread else case


SMOOTH = [name for name in CASES if name != "transformer, a dict of parts"]
