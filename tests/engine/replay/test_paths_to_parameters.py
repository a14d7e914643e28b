"""Parameters that checkpoints, hooks, forward mode and renormalised tables stand in the way of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Group, ModelCallFailed, Objective, mixed_gradient, set_gradient
from gradbox_engine.errors import BadInputs, CoupledSamples
from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE
from tests.engine.per_sample.zoo import Written
from tests.oracle import TOLERANCE, difference

PLENTY = 10**9


def _shards(*sizes: int) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"0": torch.randn(n, 5, dtype=torch.float64, generator=numbers)} for n in sizes]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def _naive(model: nn.Module, sizes: tuple[int, ...] = (2, 3, 1)) -> dict[str, Tensor]:
    """Return what one backward pass leaves in `.grad`; all parameters require grad."""
    _loss(torch.cat([model(shard["0"]) for shard in _shards(*sizes)])).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def _found(model: nn.Module, **terms: Any) -> dict[str, Tensor]:
    model = model.to(DEVICE)
    return set_gradient(model, [Group("z", _shards(2, 3, 1))], Objective(_loss), **terms).grads


def _checkpointed(*, reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    return Written(
        lambda m, x: m.c(
            checkpoint(lambda h: F.dropout(m.b(h).tanh(), 0.3), m.a(x), use_reentrant=reentrant)
        ),
        a=nn.Linear(5, 5),
        b=nn.Linear(5, 5),
        c=nn.Linear(5, 3),
    ).double()


@pytest.mark.parametrize("wrt", [["b.*"], ["b.*", "c.*"], ["c.*"]])
@pytest.mark.parametrize("retain", [0, PLENTY])
def test_a_checkpoint_above_frozen_layers_has_gradients(wrt, retain):
    """Of torch's reentrant kind, whose inputs do not require grad, they would be zeros."""
    everything = _found(_checkpointed(reentrant=False))
    found = _found(_checkpointed(reentrant=True), wrt=wrt, retain=retain)
    assert difference(found, {name: everything[name] for name in found}) <= TOLERANCE
    before = torch.utils.checkpoint.CheckpointFunction
    assert before.__name__ == "CheckpointFunction"


def _halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("retain", [0, PLENTY])
def test_a_hook_on_an_accumulated_gradient_sees_that_of_one_shard(retain):
    def model() -> nn.Module:
        torch.manual_seed(0)
        linear = nn.Linear(5, 3).double()
        linear.weight.register_post_accumulate_grad_hook(_halved)
        return linear

    assert difference(_found(model(), retain=retain), _naive(model())) <= TOLERANCE


def test_a_parameter_that_the_model_freezes_in_its_forward_pass_is_refused():
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a.weight.requires_grad_(len(x) != 3)
        return m.a(x)

    with pytest.raises(ModelCallFailed, match=r"parameter 'a\.weight': expected it to require"):
        _found(Written(forward, a=nn.Linear(5, 3)).double())


@pytest.mark.parametrize("retain", [0, 2000, PLENTY])
def test_graphs_of_forward_mode_within_the_model_are_kept(retain):
    def model() -> nn.Module:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

        def forward(m: Any, x: Tensor) -> Tensor:
            h = x @ m.w
            pushed = torch.func.jvp(lambda h: (h @ m.w).sin(), (h,), (torch.ones_like(h),))[1]
            assert isinstance(pushed, Tensor)
            return pushed

        return Written(forward, w=weight)

    assert difference(_found(model(), retain=retain), _naive(model())) <= TOLERANCE


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_with_a_largest_norm_is_left_as_it_was(kind):
    torch.manual_seed(0)
    model = Written(
        lambda m, x: m.e((x > 0).long()).reshape(len(x), -1), e=kind(2, 3, max_norm=0.5)
    ).double()
    before = model.e.weight.detach().clone()
    _found(model)
    jacobian(model, _shards(3))
    assert torch.equal(model.e.weight, before)


@pytest.mark.parametrize("compute", [_found, lambda model: jacobian(model, _shards(3))])
def test_a_scripted_part_is_refused(compute):
    scripted = torch.jit.script(nn.Linear(5, 3).double())
    with pytest.raises(BadInputs, match="module 'a': expected a module of Python code"):
        compute(Written(lambda m, x: m.a(x), a=scripted))


def test_the_default_dtype_is_put_back():
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return m.a(x)

    before = torch.get_default_dtype()
    _found(Written(forward, a=nn.Linear(5, 3)).double())
    assert torch.get_default_dtype() == before


def test_rows_of_a_table_that_counts_occurrences_are_refused():
    """One sample's gradient would depend on how often the others look the same rows up."""
    model = Written(
        lambda m, x: m.e((x > 0).long()), e=nn.EmbeddingBag(2, 3, scale_grad_by_freq=True)
    ).double()
    with pytest.raises(CoupledSamples, match="scale_grad_by_freq"):
        jacobian(model, _shards(3))


def test_a_mixed_gradient_through_gradients_that_are_clipped_on_their_way():
    """The backward pass is no linear map of the cotangent, so it matters at which one it is."""
    y = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()

    def forward(m: Any, x: Tensor) -> Tensor:
        h: Tensor = m.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g / (1 + g.norm()))
        return h.sin()

    def inner(y: Tensor, v: Tensor) -> Tensor:
        return (v**3 @ y.square()).sum() + (v @ y).sum()

    torch.manual_seed(0)
    model = Written(forward, a=nn.Linear(5, 3)).double()
    leaves = [shard["0"].clone().requires_grad_() for shard in _shards(2, 3)]
    dfdz = [torch.autograd.grad(inner(y, model(x)), x, create_graph=True)[0] for x in leaves]
    (expected,) = torch.autograd.grad(torch.cat(dfdz).square().sum(), y)
    found = mixed_gradient(
        model,
        Group("z", _shards(2, 3)),
        Objective(inner, {"y": y}, {"y": y}),
        Objective(lambda dfdz: dfdz.square().sum()),
    )
    assert difference(found.grads, {"y": expected}) <= TOLERANCE
