"""Every shard of the first pass has a graph: what a model keeps, or does without one, is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, SetGradient, set_gradient
from gradbox_engine.errors import GraphInBuffer, ModelCallFailed

NUM_SHARDS = 8
PLENTY = 10**9


def _shards(num_shards: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)}
        for _ in range(num_shards)
    ]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def _job(model: nn.Module, num_shards: int = NUM_SHARDS, **terms) -> SetGradient:
    told = {"mode": "train", "returns": ("grads", "buffers")} | terms
    return set_gradient(model, [Group("z", _shards(num_shards))], Objective(_spread), **told)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _same(a: SetGradient, b: SetGradient) -> bool:
    return a.loss == b.loss and all(
        torch.equal(left[name], right[name])
        for left, right in ((a.grads, b.grads), (a.buffers, b.buffers))
        for name in right
    )


class _Otherwise(_Model):
    """Rounds otherwise without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z if torch.is_grad_enabled() else z * (1 + 1e-15)


class _Refusing(_Model):
    """Fails without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("expected a graph")
        return self.body(x)


class _Otherbuffers(_Model):
    """Without a graph z is the same, and the statistics are not."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if not torch.is_grad_enabled():
            self.body[1].running_mean.mul_(1 + 1e-15)
        return z


class _Inner(_Model):
    """Differentiates in its own forward pass, without asking whether it may."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = torch.tanh(self.body[0](x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class _OfAnotherForm(_Model):
    """Returns z alone where there is a graph, and a pair without."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return z if torch.is_grad_enabled() else (z, None)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [_Otherwise, _Refusing, _Otherbuffers, _Inner, _OfAnotherForm])
def test_what_a_model_does_without_a_graph_never_shows(kind):
    model, expected = kind(), _job(kind(), retain=PLENTY)
    for _ in range(3):
        assert _same(_job(model), expected)


class _Caching(_Model):
    """Computes something of its weight in its first call and uses it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = self.body[0].weight.norm()
        return self.body(x) * self.scale


def test_a_tensor_kept_with_its_graph_is_an_error_and_never_a_missing_gradient():
    model = _Caching()
    for _ in range(3):
        with pytest.raises(ModelCallFailed):
            _job(model)


class _Fusing(_Model):
    """Fuses weights in its first call, by an operation that saves nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 3).double()
        self.third = nn.Linear(4, 2).double()
        self.fused: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None:
            self.fused = torch.cat([self.second.weight, self.third.weight])
        return nn.functional.linear(self.body(x), self.fused).tanh()


class _FusingInADict(_Fusing):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.fused = self.cache.get("fused")
        z = super().forward(x)
        assert self.fused is not None
        self.cache["fused"], self.fused = self.fused, None
        return z


@pytest.mark.parametrize("kind", [_Fusing, _FusingInADict])
@pytest.mark.parametrize("num_shards", [3, NUM_SHARDS])
def test_what_a_model_keeps_from_call_to_call_keeps_its_graph(kind, num_shards):
    expected = _job(kind(), num_shards, retain=PLENTY)
    assert expected.grads["second.weight"].abs().max() > 1e-4
    model = kind()
    for _ in range(4):
        assert _same(_job(model, num_shards), expected)


class _Remembering(_Model):
    """Leaves its mean in a buffer, with its graph where the first entry is large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x) + self.memory
        self.memory = z.mean(0) if x[0, 0] > 1 else z.mean(0).detach()
        return z


def test_a_graph_in_a_buffer_is_refused_in_later_jobs_too():
    shards = _shards(3)
    for shard in shards:
        shard["0"][0, 0] = 0
    model = _Remembering()
    harmless = [Group("z", shards)]
    for _ in range(2):
        set_gradient(model, harmless, Objective(_spread), mode="train")
    shards[0]["0"][0, 0] = 2
    with pytest.raises(GraphInBuffer, match="memory"):
        set_gradient(model, harmless, Objective(_spread), mode="train")
