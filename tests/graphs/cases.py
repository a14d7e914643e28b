"""Functions to trace, each with tensors for any N: the ten builtin losses, and what people write.

N samples, D features; float64 throughout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox import losses

D = 5
CLASS_WEIGHTS = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
Draw = Callable[[int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Case:
    """A function over Z and the draws of its loss inputs; those in `trained` require grad."""

    name: str
    make: Callable[[], Callable[..., Any]]
    inputs: dict[str, Draw] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    shape: tuple[int, ...] = (D,)

    def tensors(self, num: int, *, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw Z, a leaf of shape (num, *shape), and the loss inputs."""
        generator = torch.Generator().manual_seed(seed)
        z = normal(num, *self.shape, generator=generator).requires_grad_()
        inputs = {name: draw(num, generator) for name, draw in self.inputs.items()}
        for name in self.trained:
            inputs[name].requires_grad_()
        return z, inputs


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(num: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(num, generator=generator) % 3


def sample(num: int, generator: torch.Generator) -> Tensor:
    return normal(num, D, generator=generator)


def larger_sample(num: int, generator: torch.Generator) -> Tensor:
    return normal(num + 3, D, generator=generator)


def tied_times(num: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 4, (num,), generator=generator).double()


def seen(num: int, generator: torch.Generator) -> Tensor:
    return (torch.randperm(num, generator=generator) % 2).double()


def log_scale(num: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(1.5, dtype=torch.float64)


class LearnedScale(nn.Module):
    """Supervised contrastive loss with a learned scale and a head, as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.head = nn.Sequential(
            nn.Linear(D, 4, dtype=torch.float64), nn.Dropout(0.5), nn.Tanh()
        ).eval()
        self.offset: Tensor
        self.register_buffer("offset", torch.full((4,), 0.25, dtype=torch.float64))
        self.num_calls = 0
        with torch.no_grad():
            self.head[0].weight.copy_(torch.linspace(-1, 1, 4 * D).reshape(4, D))
            self.head[0].bias.copy_(torch.linspace(0, 1, 4))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        z = self.head(z) - self.offset
        logits = torch.exp(self.log_scale) * F.normalize(z) @ F.normalize(z).T
        same = labels.unsqueeze(0).eq(labels.unsqueeze(1)).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, same) + self.penalty()

    def penalty(self) -> Tensor:
        return 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())


def masked_in_place(z: Tensor, labels: Tensor, temperature: float = 0.5) -> Tensor:
    num, width = z.shape
    assert num == labels.shape[0], "one label a sample"
    sim = torch.einsum("id,jd->ij", z, z) / (temperature * math.sqrt(width))
    sim[torch.eye(num, dtype=torch.bool)] = torch.finfo(z.dtype).min
    sim += 1.0
    best, where = torch.max(sim, dim=1)
    hardest = sim.topk(2, dim=1).values[:, 1:]
    return (torch.logsumexp(sim, 1) - best).mean() + hardest.sum() + 0 * where.sum()


def boolean_mask_and_slices(z: Tensor) -> Tensor:
    c = (z - z.mean(0)).T @ (z - z.mean(0)) / (z.size(0) - 1)
    off = c[~torch.eye(c.shape[0], dtype=torch.bool, device=c.device)]
    view = c.flatten()[:-1].view(c.shape[0] - 1, c.shape[0] + 1)[:, 1:]
    return off.pow(2).sum() + view.abs().sum() + z[..., None, ::2].std()


def stopped_gradient(z: Tensor, log_scale: Tensor) -> Tensor:
    with torch.no_grad():
        target = torch.softmax(z * 3, dim=1)
        target /= target.sum(dim=0, keepdim=True)
    frozen = z.detach().clone()
    frozen.clamp_(min=-1).add_(1)
    return -(target * F.log_softmax(z * log_scale.exp(), dim=1)).sum(1).mean() + (z * frozen).mean()


def written_buffer(z: Tensor) -> Tensor:
    counts = torch.zeros(4, dtype=z.dtype)
    counts[0] = z.sum()
    row = counts[1:]
    row += z.mean(0)[:3]
    return (counts * torch.arange(4, dtype=z.dtype)).sum() + counts.square().sum()


def halves_and_literals(z: Tensor) -> Tensor:
    half = z.shape[0] // 2
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=z.dtype, device=z.device)
    left, right = z[:half], z[half : 2 * half]
    rows, columns = torch.where(left > right)
    first, second = (left * weights).chunk(2)
    return (left - right)[rows, columns].square().sum() + first.sum() - second[..., -1].mean()


def spectrograms(z: Tensor) -> Tensor:
    """Compare magnitudes of sounds at two resolutions, as losses of audio do, and a round trip."""
    left, right = z[0::2], z[1::2]
    value = (left - right).abs().mean()
    for n_fft in (16, 32):
        window = torch.hann_window(n_fft, dtype=z.dtype, device=z.device)
        found = [
            sound.stft(n_fft, hop_length=n_fft // 4, window=window, return_complex=True)
            for sound in (left, right)
        ]
        near, far = (spectrum.abs().clamp(min=1e-7) for spectrum in found)
        value = value + torch.norm(far - near) / torch.norm(far) + F.l1_loss(near.log(), far.log())
        again = torch.istft(found[0] * 0.5, n_fft, n_fft // 4, window=window, length=z.shape[1])
        value = value + again.square().mean()
    return value


def differences(z: Tensor) -> Tensor:
    (slope,) = torch.gradient(z, spacing=0.5, dim=1)
    mantissa, exponent = torch.frexp(slope)
    first, second = torch.split_with_sizes(mantissa, [2, 3], dim=1)
    return torch.ldexp(first, exponent[:, :2]).square().sum() + second.type(z.dtype).sum()


def hardest(z: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(z, labels, reduction="none")
    worst = losses.topk(min(max(1, math.trunc(0.3 * len(z))), 4)).values
    return worst.mean() + max(losses.mean() - 1.5, worst.min() / 2, 0.1 * z[0, 0])


def triplets(z: Tensor) -> Tensor:
    return F.triplet_margin_with_distance_loss(
        z,
        z.roll(1, 0),
        z.flip(0),
        distance_function=lambda a, b: 1 - F.cosine_similarity(a, b),
        margin=0.3,
        swap=True,
        reduction="sum",
    )


def pieces(z: Tensor) -> Tensor:
    left, *others = z.chunk(2)
    spread = sum(part.var() * (i + 1) for i, part in enumerate(torch.tensor_split(z, 3, dim=1)))
    first, second = torch.split(left, split_size_or_sections=[1, 4], dim=1)
    for place in range(len(halves := z.split([2, 3], dim=1))):
        spread = spread + halves[place].std() * len(halves)
    ends = sum(row.norm() for row in z[:2]) - sum(row.norm() for row in z[-3:-1])
    return (
        ends * F.mse_loss(*z.chunk(chunks=2))
        + others[0].mean() * spread
        + first.sum() * second.mean()
    )


def types_of_python(z: Tensor) -> Tensor:
    with torch.autocast(device_type=z.device.type, enabled=False):
        others = ~torch.eye(z.shape[0], dtype=bool, device=z.device)
        counts = torch.arange(z.shape[0], dtype=int).to(float)
        assert not z.is_sparse
        return (z @ z.T)[others].logsumexp(0) + (z.sum(1) * counts).mean()


def older_spellings(z: Tensor, log_scale: Tensor) -> Tensor:
    device = torch.device("cuda") if z.is_cuda else torch.device("cpu")
    kept = torch.ones(D, device=device).type(torch.DoubleTensor)
    if z.device != kept.device or z.device.type == "cuda":
        kept = kept.to(z.device)
    weight = (1 - z.sigmoid().data) ** 2 * log_scale.data * z.new_tensor([0.1, 2, 3, 4, 5])
    weight.data.clamp_(max=0.5)
    return (weight * z * kept).sum() + log_scale * z.new_tensor(2, dtype=torch.float32)


def learned_closure_constant() -> Callable[..., Any]:
    weights = torch.linspace(0.1, 1.0, D, dtype=torch.float64)
    return lambda z: (z * weights).square().sum() / len(weights)


def partial_function() -> Callable[..., Any]:
    return functools.partial(masked_in_place, temperature=0.1)


CASES = [
    Case("info_nce", lambda: losses.info_nce),
    Case(
        "clip_symmetric",
        lambda: losses.clip_symmetric,
        {"texts": sample, "log_scale": log_scale},
        trained=("texts", "log_scale"),
    ),
    Case("supervised_contrastive", lambda: losses.supervised_contrastive, {"labels": classes}),
    Case("vicreg", lambda: losses.vicreg),
    Case("barlow_twins", lambda: losses.barlow_twins, {"right": sample}, trained=("right",)),
    Case("mmd", lambda: losses.mmd, {"reference": larger_sample}, trained=("reference",)),
    Case("wasserstein_1d", lambda: losses.wasserstein_1d, {"reference": sample}),
    Case("triplet_all", lambda: losses.triplet_all, {"labels": classes}),
    Case(
        "cox_partial_likelihood",
        lambda: losses.cox_partial_likelihood,
        {"times": tied_times, "events": seen},
        shape=(1,),
    ),
    Case("cross_entropy", lambda: losses.cross_entropy, {"labels": classes}),
    Case("module with a learned scale", LearnedScale, {"labels": classes}),
    Case("in-place mask", lambda: masked_in_place, {"labels": classes}),
    Case("boolean mask and slices", lambda: boolean_mask_and_slices),
    Case("no_grad and detach", lambda: stopped_gradient, {"log_scale": log_scale}, ("log_scale",)),
    Case("buffer written through a view", lambda: written_buffer),
    Case("halves and literals", lambda: halves_and_literals),
    Case("a module of torch's", lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS), {"target": classes}),
    Case("spectrograms", lambda: spectrograms, shape=(64,)),
    Case("differences", lambda: differences),
    Case("hardest samples", lambda: hardest, {"labels": classes}),
    Case("triplets", lambda: triplets),
    Case("pieces", lambda: pieces),
    Case("types of Python", lambda: types_of_python),
    Case("older spellings", lambda: older_spellings, {"log_scale": log_scale}, ("log_scale",)),
    Case("closure constant", learned_closure_constant),
    Case("partial", partial_function, {"labels": classes}),
    Case("a torch function", lambda: torch.sum),
]
