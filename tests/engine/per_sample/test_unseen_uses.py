"""What a use that no function call shows adds to the rows is not lost, however small it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@torch.jit.script
def _scripted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


class _Model(nn.Module):
    """A seen use of its weight, and an unseen one that adds little."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + 0.08 * self.unseen(x)

    def unseen(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _ByAutograd(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x @ self.weight).tanh().sum(), x, create_graph=True)
        return slope


class _ByTransform(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (x @ self.weight).tanh().sum())(x)


class _ByForwardMode(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        _, slope = torch.func.jvp(lambda x: (x @ self.weight).tanh(), (x,), (x.sin(),))
        return slope


class _Vectorised(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: (row @ self.weight).tanh())(x)


class _Scripted(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        found: Tensor = _scripted(x, self.weight)
        return found


class _Hidden(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return (x @ self.weight).tanh()


class _AKeptView(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        return (x.tanh() @ self.turned).tanh()

    def turn(self) -> None:
        self.turned = self.weight.T


class _WrittenByAView(_Model):
    def unseen(self, x: Tensor) -> Tensor:
        corners = torch.eye(4, dtype=x.dtype, device=x.device).view(2, 2, 4)
        made = torch.nn.functional.linear(corners, self.weight, self.weight[0])
        made.view(4, 4).sin_()
        return (x.tanh() @ made.flatten(0, 1)).tanh()


UNSEEN = [
    _ByAutograd,
    _ByTransform,
    _ByForwardMode,
    _Vectorised,
    _Scripted,
    _Hidden,
    _AKeptView,
    _WrittenByAView,
]


class _OfAConstant(_Model):
    """Moves along a slope, which it takes as a constant."""

    def unseen(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x @ self.weight).tanh().sum(), x)
        return slope


def _written_in_views(self: nn.Module, x: Tensor) -> Tensor:
    kept = torch.zeros(len(x), 2, 4, dtype=x.dtype, device=x.device)
    kept[:, 0].copy_(x @ self.weight)  # type: ignore[operator]
    kept[:, 1] = x
    return (kept @ self.weight).relu_().sum(1)  # type: ignore[operator]


def _losses(z: Tensor) -> Tensor:
    return z.float().square().sum(1) if z.dtype == torch.bfloat16 else z.square().sum(1)


def _built(kind: type[_Model], dtype: torch.dtype) -> _Model:
    torch.manual_seed(0)
    model = kind().to(DEVICE, dtype)
    if isinstance(model, _AKeptView):
        model.turn()
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", UNSEEN)
def test_rows_hold_what_an_unseen_use_adds(kind: type[_Model], dtype: torch.dtype) -> None:
    model, shard = _built(kind, dtype), moved({"0": torch.randn(6, 4, dtype=dtype)})
    parameters = dict(model.named_parameters())
    expected = naive.rows(_losses(model(shard["0"]))[:, None], parameters)["weight"][:, 0]
    found = per_sample_gradient(model, [shard], _losses)
    near = 8 * torch.finfo(dtype).eps * float(expected.abs().amax())
    torch.testing.assert_close(found.arrays["weight"], expected, rtol=0.0, atol=near)
    assert found.loops == {"weight": "it is used by what no function call shows"}


@pytest.mark.parametrize("forward", [_OfAConstant.forward, _written_in_views])
def test_other_operations_that_no_call_shows_cost_no_loop(
    forward: Callable[[nn.Module, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_OfAConstant, "forward", forward)
    model = _built(_OfAConstant, torch.float64)
    shard = moved({"0": torch.randn(6, 4, dtype=torch.float64)})
    expected = naive.rows(_losses(model(shard["0"]))[:, None], dict(model.named_parameters()))
    found = per_sample_gradient(model, [shard], _losses)
    torch.testing.assert_close(found.arrays["weight"], expected["weight"][:, 0])
    assert not found.loops


class _UnseenTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            looked_up = self.table(ids)
        found: Tensor = self.layer(looked_up).sum(1)
        return found


def test_a_sparse_table_may_be_looped_over() -> None:
    model, shard = _UnseenTable().to(DEVICE), moved({"ids": torch.randint(7, (5, 3))})
    expected = naive.rows(_losses(model(**shard))[:, None], dict(model.named_parameters()))
    found = per_sample_gradient(model, [shard], _losses)
    assert set(found.loops) == {"table.weight"}
    for name, rows in expected.items():
        torch.testing.assert_close(found.arrays[name], rows[:, 0])


def test_a_parameter_used_in_inference_mode_is_a_constant_there() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            gate = (x @ self.weight).sigmoid()  # type: ignore[operator]
        return x @ self.weight * gate.clone()  # type: ignore[operator,no-any-return]

    model = _built(_OfAConstant, torch.float64)
    model.forward = forward.__get__(model)  # type: ignore[method-assign]
    shard = moved({"0": torch.randn(6, 4, dtype=torch.float64)})
    expected = naive.rows(_losses(model(shard["0"]))[:, None], dict(model.named_parameters()))
    found = per_sample_gradient(model, [shard], _losses)
    torch.testing.assert_close(found.arrays["weight"], expected["weight"][:, 0])
    assert not found.loops
