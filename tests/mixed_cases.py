"""The table of mixed problems, in float64, and their answers by double backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine import shard_stream
from tests import mixed_models as models
from tests.device import DEVICE, moved, native_recurrence, tolerance

TOLERANCE = 10 * tolerance(torch.float64)
"""Largest relative difference in float64 between the engine and double backward."""

Shards = list[dict[str, Tensor]]


@dataclass(frozen=True)
class MixedCase:
    """One problem. `y` is passed to `inner` by name, and to `outer` what `outer_reads` lists."""

    model: Callable[[], nn.Module]
    shards: Shards
    inner: Callable[..., Tensor]
    outer: Callable[..., Tensor]
    y: dict[str, Tensor] = field(default_factory=dict)
    x: dict[str, Tensor] = field(default_factory=dict)
    outer_reads: tuple[str, ...] = ()
    z: str = "0"
    mode: Literal["eval", "train"] = "train"
    seed: int = 3
    output: str | int | None = None
    readout: Callable[[Any, dict[str, Tensor]], Any] | None = None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What the answer is differentiated by: y, or the parameters of a module."""
        if isinstance(self.inner, nn.Module):
            self.inner.to(DEVICE)
            return {f"inner.{name}": p for name, p in self.inner.named_parameters()}
        return {f"y.{name}": tensor.requires_grad_() for name, tensor in self.y.items()}

    @property
    def outer_inputs(self) -> dict[str, Tensor]:
        return {**self.x, **{name: self.y[name] for name in self.outer_reads}}


@dataclass(frozen=True)
class MixedAnswer:
    """What a case's job has to return."""

    value: float
    grads: dict[str, Tensor]
    dfdz: Tensor
    buffers: dict[str, Tensor]


def double_backward(case: MixedCase) -> MixedAnswer:
    """Answer a case by the code one would write first: all graphs of G alive, and theirs again.

    Fused attention cannot be differentiated twice, so this too runs without it.
    """
    model = case.model().to(DEVICE).requires_grad_(False).train(case.mode == "train")
    leaves, y = case.leaves, moved(case.y)
    gradients = []
    with sdpa_kernel(SDPBackend.MATH), native_recurrence():
        for index, shard in enumerate(map(moved, case.shards)):
            z = shard[case.z].clone().requires_grad_()
            with shard_stream(case.seed, 0, index):
                v = _call(model, case, {**shard, case.z: z.clone()})
            inner = case.inner(**y, v=v)
            gradients += torch.autograd.grad(inner, z, create_graph=True)
        dfdz = torch.stack(gradients) if gradients[0].ndim == 0 else torch.cat(gradients)
        value = case.outer(dfdz, **moved(case.outer_inputs))
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), found, strict=True)
    return MixedAnswer(
        value=value.item(),
        grads={n: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in named},
        dfdz=dfdz.detach(),
        buffers=dict(model.named_buffers()),
    )


def _call(model: nn.Module, case: MixedCase, arguments: Mapping[str, Tensor]) -> Any:
    places = [value for name, value in arguments.items() if name.isdigit()]
    value = model(*places, **{n: v for n, v in arguments.items() if not n.isdigit()})
    if case.output is not None:
        value = value[case.output]
    return value if case.readout is None else case.readout(value, dict(arguments))


# --- functions ---------------------------------------------------------------------------------


def bilinear(y: Tensor, v: Tensor) -> Tensor:
    """Σ_b yᵀ v_b, linear in v: a does not depend on v."""
    return (v.flatten(1) @ y).sum()


def cubic(y: Tensor, v: Tensor) -> Tensor:
    """Of third order in v and in y."""
    v = v.flatten(1)
    return (v**3 @ y.square()).sum() + (v @ y).pow(3).sum() + (v @ y.sin()).square().sum()


def of_parts(y: Tensor, v: dict[str, Tensor]) -> Tensor:
    """Reads a dict of outputs."""
    return (v["first"] @ y).square().sum() + (v["mean"] ** 3 @ y).sum()


def penalty(dfdz: Tensor) -> Tensor:
    """The WGAN-GP penalty (Gulrajani et al. 2017, equation 3)."""
    return (dfdz.flatten(1).norm(dim=1) - 1).square().mean()


def coupled(dfdz: Tensor, target: Tensor) -> Tensor:
    """Couples all shards, and reads x."""
    dfdz = dfdz.flatten(1)
    gram = torch.tanh(dfdz @ dfdz.T)
    return gram.logsumexp(1).sum() + (dfdz.sum() - target.sum()).square()


def with_y(dfdz: Tensor, y: Tensor) -> Tensor:
    """Reads y directly too."""
    return penalty(dfdz) * y.square().sum() + y.prod()


class Critic(nn.Module):
    """D of a GAN: one number for a batch of images, whose penalty trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, dtype=torch.float64)
        self.head = nn.Linear(3 * 6 * 6, 1, dtype=torch.float64)
        self.unused = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, v: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(v)).flatten(1)).sum()


def critic() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Critic()


# --- data --------------------------------------------------------------------------------------


def normal(sizes: tuple[int, ...], *shape: int, seed: int = 11) -> Shards:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"0": torch.randn(size, *shape, generator=generator, dtype=torch.float64)} for size in sizes
    ]


def vector(size: int, *, seed: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _sentences(sizes: tuple[int, ...]) -> Shards:
    generator = torch.Generator().manual_seed(13)
    return [
        {
            "tokens": torch.randint(0, 7, (size, 4), generator=generator),
            "hidden": torch.randn(size, 4, 8, generator=generator, dtype=torch.float64),
        }
        for size in sizes
    ]


def _first_and_mean(hidden: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"first": hidden[:, 0], "mean": hidden.mean(1) + inputs["hidden"].mean(1)}


RAGGED = (3, 3, 1)


def _mlp(**terms: Any) -> MixedCase:
    shards = terms.pop("shards", None) or normal(RAGGED, 5)
    told = {"inner": cubic, "outer": penalty, "y": {"y": vector(3)}}
    return MixedCase(models.inplace_mlp, shards, **(told | terms))


def _plain(model: Callable[[], nn.Module], **terms: Any) -> MixedCase:
    """A model of (B, 5) → (B, 3)."""
    return MixedCase(model, normal(RAGGED, 5), cubic, penalty, {"y": vector(3)}, **terms)


def _images(model: Callable[[], nn.Module], size: int, **terms: Any) -> MixedCase:
    """A model of (B, 6) or (B, 2, 6, 6) whose outputs have `size` numbers a sample."""
    shards = normal(RAGGED, 6) if model is models.generator else normal((3, 3, 2), 2, 6, 6)
    told = {"inner": cubic, "outer": penalty, "y": {"y": vector(size)}}
    return MixedCase(model, shards, **(told | terms))


def _transformer(**terms: Any) -> MixedCase:
    told = {"inner": of_parts, "outer": penalty, "y": {"y": vector(8)}, "z": "hidden"}
    told |= {"output": "hidden", "readout": _first_and_mean}
    return MixedCase(models.transformer, _sentences((2, 3, 1)), **(told | terms))


def _recurrent(**terms: Any) -> MixedCase:
    told = {"inner": cubic, "outer": penalty, "y": {"y": vector(3)}}
    return MixedCase(models.recurrent, normal((2, 1), 4, 4), **(told | terms))


MIXED_CASES: dict[str, Callable[[], MixedCase]] = {
    "mlp, bilinear": lambda: _mlp(inner=bilinear),
    "mlp, cubic": _mlp,
    "mlp in eval": lambda: _mlp(mode="eval"),
    "mlp, one shard": lambda: _mlp(shards=normal((4,), 5)),
    "mlp, 32 shards": lambda: _mlp(shards=normal((2,) * 31 + (1,), 5)),
    "mlp, all shards coupled": lambda: _mlp(outer=coupled, x={"target": vector(4)}),
    "mlp, outer reads y": lambda: _mlp(outer=with_y, outer_reads=("y",)),
    "cnn in train": lambda: _images(models.cnn, 3),
    "cnn in eval": lambda: _images(models.cnn, 3, mode="eval"),
    "cnn, bilinear, coupled": lambda: _images(
        models.cnn, 3, inner=bilinear, outer=coupled, x={"target": vector(4)}
    ),
    "generator in train": lambda: _images(models.generator, 64),
    "generator in eval": lambda: _images(models.generator, 64, mode="eval"),
    "generator, 32 shards": lambda: MixedCase(
        models.generator, normal((2,) * 32, 6), cubic, penalty, {"y": vector(64)}
    ),
    "generator under a critic": lambda: _images(models.generator, 64, inner=critic(), y={}),
    "transformer": _transformer,
    "transformer in eval": lambda: _transformer(mode="eval"),
    "lstm and gru": _recurrent,
    "lstm and gru in eval": lambda: _recurrent(mode="eval"),
    "checkpoints": lambda: _plain(lambda: models.checkpointed(reentrant=False)),
    "checkpoints in eval": lambda: _plain(
        lambda: models.checkpointed(reentrant=False), mode="eval"
    ),
}
"""Problems that forward mode can solve."""

OBSTACLES: dict[str, Callable[[], MixedCase]] = {
    "_weight_norm_interface": lambda: _plain(models.normed),
    "a custom autograd.Function": lambda: _plain(models.custom_functions),
    "forward mode that disagrees with reverse mode": lambda: _plain(models.constant_branch),
}
"""Problems that it cannot, by what is in its way."""
