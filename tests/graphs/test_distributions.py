"""Losses of `torch.distributions` have their own values and gradients, and their own checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor

from gradbox.errors import UntraceableLoss
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
K = 5


# z real, s positive, u in (0, 1), n counts below K; each (N, K).
LOSSES: dict[str, Loss] = {
    "Normal": lambda z, s, u, n: D.Normal(z, s).log_prob(u).sum(),
    "Normal of numbers": lambda z, s, u, n: D.Normal(0.5, 2.0).log_prob(z).sum(),
    "Normal beside a number": lambda z, s, u, n: D.Normal(z, 0.3).log_prob(u).sum(),
    "Normal, entropy": lambda z, s, u, n: D.Normal(z, s).entropy().sum(),
    "Normal, cdf": lambda z, s, u, n: D.Normal(z, s).cdf(u).sum(),
    "Independent": lambda z, s, u, n: D.Independent(D.Normal(z, s), 1).log_prob(u).square().sum(),
    "Laplace": lambda z, s, u, n: D.Laplace(z, s).log_prob(u).sum(),
    "Cauchy": lambda z, s, u, n: D.Cauchy(z, s).log_prob(u).sum(),
    "StudentT": lambda z, s, u, n: D.StudentT(2.7, z, s).log_prob(u).sum(),
    "Uniform": lambda z, s, u, n: D.Uniform(z, z + s).log_prob(z + s * u).sum(),
    "VonMises": lambda z, s, u, n: D.VonMises(z, s).log_prob(u).sum(),
    "Exponential": lambda z, s, u, n: D.Exponential(s).log_prob(u).sum(),
    "Beta": lambda z, s, u, n: D.Beta(s, s + 1).log_prob(u).sum(),
    "Dirichlet": lambda z, s, u, n: D.Dirichlet(s).log_prob(u / u.sum(-1, keepdim=True)).sum(),
    "Bernoulli": lambda z, s, u, n: D.Bernoulli(logits=z).log_prob((u > 0.5).double()).sum(),
    "ContinuousBernoulli": lambda z, s, u, n: D.ContinuousBernoulli(logits=z).log_prob(u).sum(),
    "Geometric": lambda z, s, u, n: D.Geometric(logits=z).log_prob(n).sum(),
    "Binomial": lambda z, s, u, n: D.Binomial(K, logits=z).log_prob(n).sum(),
    "NegativeBinomial": lambda z, s, u, n: D.NegativeBinomial(s, logits=z).log_prob(n).sum(),
    "Poisson": lambda z, s, u, n: D.Poisson(s).log_prob(n).sum(),
    "Multinomial": lambda z, s, u, n: D.Multinomial(K, logits=z).log_prob(torch.ones_like(z)).sum(),
    "Categorical": lambda z, s, u, n: D.Categorical(logits=z).log_prob(n[:, 0]).sum(),
    "Categorical of chances": lambda z, s, u, n: D.Categorical(probs=s).log_prob(n[:, 0]).sum(),
    "Categorical, entropy": lambda z, s, u, n: D.Categorical(logits=z).entropy().sum(),
    "OneHotCategorical": lambda z, s, u, n: (
        D.OneHotCategorical(logits=z).log_prob(F.one_hot(n[:, 0].long(), K).double()).sum()
    ),
    "KL of Normal": lambda z, s, u, n: D.kl_divergence(D.Normal(z, s), D.Normal(0.0, 1.0)).sum(),
    "KL of Independent": lambda z, s, u, n: (
        D.kl_divergence(
            D.Independent(D.Normal(z, s), 1), D.Independent(D.Normal(u, torch.ones_like(u)), 1)
        )
        .square()
        .sum()
    ),
    "KL of Categorical": lambda z, s, u, n: D.kl_divergence(
        D.Categorical(logits=z), D.Categorical(probs=s)
    ).sum(),
    "KL of Dirichlet": lambda z, s, u, n: D.kl_divergence(D.Dirichlet(s), D.Dirichlet(s + u)).sum(),
    "KL of Beta": lambda z, s, u, n: D.kl_divergence(D.Beta(s, u), D.Beta(u, s)).sum(),
    "not validated": lambda z, s, u, n: D.Normal(z, s, validate_args=False).log_prob(u).sum(),
}


def tensors(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num)
    z, s, u = (torch.rand(num, K, generator=generator, dtype=torch.float64) for _ in range(3))
    n = torch.randint(0, K, (num, K), generator=generator).double()
    return [(z * 4 - 2).requires_grad_(), (s + 0.3).requires_grad_(), u * 0.8 + 0.1, n]


def rebuilt(loss: Loss) -> Callable[..., Tensor]:
    traced = trace(loss, positional=4)
    function: Callable[..., Tensor] = build(traced.graph, traced.tensors, device="cpu")
    return function


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_distributions_is_exact(name: str) -> None:
    again = rebuilt(LOSSES[name])
    for num in (3, 7):
        given = tensors(num)
        expected, got = LOSSES[name](*given), again(*given)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        gradients = [
            torch.autograd.grad(value, given[:2], allow_unused=True, materialize_grads=True)
            for value in (got, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
        assert any(gradient.any() for gradient in gradients[0])


OUTSIDE: dict[str, Loss] = {
    "a scale below 0": lambda z, s, u, n: D.Normal(z, -s).log_prob(u).sum(),
    "a value below 0": lambda z, s, u, n: D.Exponential(s).log_prob(-u).sum(),
    "a class above the last": lambda z, s, u, n: (
        D.Categorical(logits=z).log_prob(n[:, 0] + K).sum()
    ),
    "one column for all": lambda z, s, u, n: (
        D.Dirichlet(s).log_prob(torch.ones_like(u[:, :1])).sum()
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_torch_validates_is_checked_on_the_box(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile, once used, switches it off for the process.
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    given, again = tensors(3), rebuilt(OUTSIDE[name])
    with pytest.raises(ValueError, match=r"xpected|does not equal|must match"):
        OUTSIDE[name](*given)
    with pytest.raises(AssertionError):
        again(*given)


def covariant(z: Tensor, s: Tensor, u: Tensor, n: Tensor) -> Tensor:
    return D.MultivariateNormal(z, torch.eye(K, dtype=torch.float64)).log_prob(u).sum()


REFUSED: dict[str, tuple[Loss, str]] = {
    "a sample": (lambda z, s, u, n: D.Normal(z, s).rsample().sum(), "loss_inputs"),
    "a covariance": (covariant, r"client.model\("),
    "entries transformed": (
        lambda z, s, u, n: D.LogNormal(z, s).log_prob(u).sum(),
        r"client.model\(",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_says_what_to_do(name: str) -> None:
    loss, advice = REFUSED[name]
    with pytest.raises(UntraceableLoss, match=advice):
        trace(loss, positional=4)


def test_distributions_are_torchs_own_again_afterwards() -> None:
    before = [vars(kind).get("__init__") for kind in (D.Categorical, D.MultivariateNormal)]
    trace(LOSSES["Categorical"], positional=4)
    after = [vars(kind).get("__init__") for kind in (D.Categorical, D.MultivariateNormal)]
    assert before == after
    assert D.Normal(0.0, 1.0).sample() is not None
