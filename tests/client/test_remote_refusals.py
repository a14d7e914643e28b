"""What a remote model refuses because it would be wrong, and what an unfetched output withholds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from gradbox import GradClient, InvalidInputs
from tests.boxes import TestBox
from tests.case_models import mlp
from tests.client.test_remote_oracle import shards_of


@pytest.fixture
def client(twin: TestBox) -> Iterator[GradClient]:
    with twin.client() as client:
        yield client


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_call_in_a_checkpointed_function_is_refused(
    client: GradClient, use_reentrant: bool
) -> None:
    f = client.model("inplace_mlp", mode="train")  # a second call draws other dropout
    x = shards_of(4)[0].requires_grad_()
    with pytest.raises(InvalidInputs, match="checkpoint"):
        checkpoint(lambda x: f(x).square(), x, use_reentrant=use_reentrant)
    assert f(x).isfinite().all()


def test_a_call_on_a_dual_tensor_is_refused(client: GradClient) -> None:
    (x,) = shards_of(2)
    f = client.model("mlp")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(InvalidInputs, match=r"'0'.*tangent"):
            f(dual)
        assert f(x).isfinite().all()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: torch.autograd.grad(f(x), x, torch.ones(2, 3, 3), is_grads_batched=True),
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    ],
)
def test_a_batch_of_cotangents_is_refused(
    client: GradClient, differentiate: Callable[[Any, Tensor], Any]
) -> None:
    with pytest.raises(InvalidInputs, match="once for each"):
        differentiate(client.model("mlp"), shards_of(3)[0].requires_grad_())


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss, weights: torch.autograd.grad(loss, weights),
        lambda loss, weights: torch.autograd.grad(loss + weights[0].sum(), weights[:1]),
        lambda loss, weights: loss.backward(inputs=weights),
    ],
)
def test_autograd_gives_no_gradient_of_weights_but_says_where_it_is(
    client: GradClient, differentiate: Callable[[Any, list[Tensor]], Any]
) -> None:
    layers = mlp()
    f = client.model("mlp", weights=dict(layers.named_parameters()))
    weights = list(layers.parameters())
    with pytest.raises(InvalidInputs, match=r"loss\.backward\(\) they are in f\.grads by name"):
        differentiate(f(shards_of(3)[0]).sum(), weights)
    assert not f.grads


def test_weights_have_no_gradient_but_that_of_the_rest_of_the_loss(client: GradClient) -> None:
    layers = mlp()
    called: list[Tensor | None] = []
    layers[4].bias.register_hook(called.append)
    f = client.model("mlp", weights=dict(layers.named_parameters()))
    (f(shards_of(3)[0]).sum() + layers[0].bias.square().sum()).backward()
    torch.testing.assert_close(layers[0].bias.grad, 2 * layers[0].bias.detach())
    assert all(p.grad is None for n, p in layers.named_parameters() if n != "0.bias")
    assert f.grads.keys() == dict(layers.named_parameters()).keys()
    assert not called


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_refused(client: GradClient, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInputs, match=r"client\.model"):
        copied(client.model("mlp"))


def test_an_output_first_used_in_a_transformed_function_is_refused(client: GradClient) -> None:
    (x,) = shards_of(2)
    z = client.model("mlp")(x)

    def product(y: Tensor) -> Tensor:
        return (y * z).sum()

    with pytest.raises(InvalidInputs, match="clone"):
        torch.func.grad(product)(torch.ones(2, 3, dtype=torch.float64))
    fetched = z.clone()
    found = torch.func.grad(product)(torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(found, fetched)


@pytest.mark.parametrize(
    "use",
    [
        lambda z: torch.tensor(z),
        lambda z: torch.as_tensor(z, dtype=torch.float32),
        lambda z: torch.func.grad(torch.sin)(z),
    ],
)
def test_code_that_looks_past_torch_functions_finds_no_numbers(
    client: GradClient, use: Callable[[Tensor], Tensor]
) -> None:
    with torch.no_grad():
        z = client.model("scalars", mode="eval")(torch.ones(2, 5, dtype=torch.float64))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        use(z).item()


def test_a_weight_that_is_no_tensor_is_refused_by_its_name(client: GradClient) -> None:
    f = client.model("mlp", weights={"4.bias": [0.0, 0.0, 0.0]})
    with pytest.raises(InvalidInputs, match=r"weights\['4.bias'\]: expected .*, got list"):
        f(shards_of(2)[0])


def test_a_complex_input_that_requires_grad_is_refused(client: GradClient) -> None:
    f = client.model("mlp")
    z = torch.ones(2, 5, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(InvalidInputs, match="argument '0': expected real numbers"):
        f(z)
    assert f(shards_of(2)[0]).isfinite().all()
