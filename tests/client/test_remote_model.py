"""What naive PyTorch code does with a model, done with a remote one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradbox import GradClient, InvalidInputs, ModelCallFailed, UnknownModel
from gradbox.http.posting import read_answer
from tests import case_models
from tests.boxes import TestBox, twin_box
from tests.client.remote import NaiveModel
from tests.client.test_remote_oracle import shards_of
from tests.oracle import TOLERANCE, difference


@pytest.fixture
def client(twin: TestBox) -> Iterator[GradClient]:
    with twin.client() as client:
        yield client


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The computations of the jobs that this process posts, in order."""
    seen: list[str] = []
    send = httpx.Client.send

    def watched(self: httpx.Client, request: httpx.Request, **given: Any) -> httpx.Response:
        answer = send(self, request, **given)
        if request.method == "POST":
            answer.read()
            seen.append(read_answer(answer).view.computation)
        return answer

    monkeypatch.setattr(httpx.Client, "send", watched)
    return seen


def test_calls_send_nothing_and_use_sends_them_together(
    client: GradClient, posted: list[str]
) -> None:
    f = client.model("mlp")
    zs = [f(x) for x in shards_of(2, 3, 1)]
    assert posted == []
    loss = torch.cat(zs).square().sum()
    assert posted == ["forward"]
    loss.backward()
    assert posted == ["forward", "gradient"]


@pytest.mark.parametrize("backward", [True, False])
def test_outputs_that_nobody_holds_are_freed(client: GradClient, *, backward: bool) -> None:
    f = client.model("mlp")
    x = shards_of(2)[0].requires_grad_()
    z = f(x)
    loss = z.square().sum()
    if backward:
        loss.backward()
    with torch._C.DisableTorchFunctionSubclass():
        batch = weakref.ref(z._forward)
    assert batch() is not None
    del z, loss
    gc.collect()
    assert batch() is None


def test_both_jobs_go_by_the_name_and_priority_that_were_given(client: GradClient) -> None:
    f = client.model("mlp", name="named", priority=-3)
    f(shards_of(2)[0]).sum().backward()
    views = [job.view for job in client.jobs(limit=2)]
    assert [(view.name, view.priority) for view in views] == [("named", -3)] * 2


def test_an_output_is_a_tensor_with_a_grad_fn(client: GradClient) -> None:
    (x,) = shards_of(4)
    z = client.model("mlp")(x)
    expected = case_models.mlp()(x)
    assert isinstance(z, Tensor)
    assert z.shape == (4, 3)
    assert z.grad_fn is not None
    assert z.requires_grad
    assert z.dtype == torch.float64
    assert len(z) == 4
    assert "tensor(" in repr(z)
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(torch.stack(list(z)), expected)
    np.testing.assert_allclose(np.asarray(z.detach()), expected.detach())
    assert type(z + 1) is Tensor


def test_calls_of_different_shapes_share_a_job(client: GradClient, posted: list[str]) -> None:
    def tokens(length: int) -> Tensor:
        return torch.arange(2 * length).reshape(2, length) % 11

    def masks(length: int) -> Tensor:
        return torch.ones(2, length, dtype=torch.bool)

    f = client.model("transformer", output="hidden")
    zs = [f(tokens=tokens(n), mask=masks(n)) for n in (3, 5, 4)]
    sum(z.square().mean() for z in zs).backward()
    naive = NaiveModel(case_models.transformer())
    sum(naive(tokens(n), masks(n))["hidden"].square().mean() for n in (3, 5, 4)).backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE
    assert posted == ["forward", "gradient"]


def test_other_entry_points_are_methods(client: GradClient) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    features = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return (images @ texts.T).logsumexp(0).sum()

    f = client.model("towers", mode="train")
    loss(f.encode_image(pixels), f.encode_text(features=features)).backward()
    naive = NaiveModel(case_models.towers(), mode="train")
    loss(naive(pixels, method="encode_image"), naive(features, method="encode_text")).backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_gradients_add_up_until_they_are_zeroed_and_go_into_a_module(client: GradClient) -> None:
    x, y = shards_of(4, 2)
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    for model in (f, naive):
        model(x).square().sum().backward()
        model(y).exp().sum().backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE
    local = case_models.mlp()
    f.apply_to(local)
    f.apply_to(local)
    doubled = {name: 2 * gradient for name, gradient in naive.grads.items()}
    assert difference({n: p.grad for n, p in local.named_parameters()}, doubled) <= TOLERANCE
    f.zero_grad()
    assert f.grads == {}


def test_a_second_backward_needs_retain_graph(client: GradClient) -> None:
    (x,) = shards_of(4)
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    for model in (f, naive):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_a_sum_alone_cannot_be_differentiated_twice_either(client: GradClient) -> None:
    loss = client.model("mlp")(shards_of(4)[0]).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_no_grad_calls_record_nothing(client: GradClient, posted: list[str]) -> None:
    x, y = shards_of(4, 2)
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    for model in (f, naive):
        with torch.no_grad():
            baseline = model(x)
        z = model(y)
        assert not baseline.requires_grad
        (z.sum() * baseline.sum()).backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE
    assert posted == ["forward", "gradient"]


def test_an_output_first_used_without_grad_still_has_its_graph(client: GradClient) -> None:
    z = client.model("mlp")(shards_of(4)[0])
    with torch.inference_mode():
        assert z.sum().isfinite()
    z.square().sum().backward()


def test_writing_to_inputs_and_outputs_is_as_in_local_code(client: GradClient) -> None:
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    for model in (f, naive):
        (x,) = shards_of(4)
        z = model(x.clone()) if model is naive else model(x)
        x.zero_()  # a local graph would refuse to go back through x
        z *= 2
        z.mul_(3)
        z.square().sum().backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_calls_see_live_weights_as_they_are_then(client: GradClient) -> None:
    (x,) = shards_of(4)
    local = case_models.mlp()
    weights = {name: p for name, p in local.named_parameters() if name.startswith("4.")}
    f, naive = client.model("mlp", weights=weights), NaiveModel(case_models.mlp())
    before = f(x)
    with torch.no_grad():
        local[4].weight.mul_(2)
        after = f(x)
        local[4].bias.data.zero_()  # leaves no trace in the version counter
    last = f(x)
    (before.exp() + 2 * after.exp() + 3 * last.exp()).sum().backward()
    assert not after.requires_grad
    z = naive(x)
    expected = torch.cat([z, naive(x) * 0])
    assert torch.equal(before, z)
    torch.testing.assert_close(last, local(x))
    assert expected.requires_grad


def test_several_outputs_of_a_readout_come_by_name(client: GradClient) -> None:
    def halves(output: Tensor, inputs: Any) -> dict[str, Tensor]:
        return {"left": output[:, :2], "right": output[:, 2:].exp()}

    (x,) = shards_of(4)
    z = client.model("mlp", readout=halves)(x)
    assert z.keys() == {"left", "right"}
    torch.testing.assert_close(z["right"], case_models.mlp()(x)[:, 2:].exp())
    z["left"].sum().backward()


def test_a_second_derivative_names_what_to_use(client: GradClient) -> None:
    x = shards_of(4)[0].requires_grad_()
    z = client.model("mlp")(x)
    with pytest.raises(InvalidInputs, match="MixedGradient"):
        torch.autograd.grad(z.square().sum(), [x], create_graph=True)


def test_an_error_on_the_box_names_the_line_of_the_call(client: GradClient) -> None:
    f = client.model("mlp")
    good = f(shards_of(2)[0])
    bad = f(shards_of(2, features=9)[0])  # this line
    with pytest.raises(ModelCallFailed) as caught:
        bad.sum()
    line = test_an_error_on_the_box_names_the_line_of_the_call.__code__.co_firstlineno + 3
    assert f"{__file__}:{line}" in "".join(caught.value.__notes__)
    with pytest.raises(ModelCallFailed):
        good.sum()
    assert f(shards_of(2)[0]).isfinite().all()


@pytest.mark.parametrize("read", ["a later call", "the buffers"])
def test_a_failed_call_whose_output_nobody_reads_is_told_before_what_follows_it(
    client: GradClient, read: str
) -> None:
    f = client.model("average_in_place", mode="train")
    f(shards_of(2)[0]).sum()
    before = f.buffers["average"]
    f(shards_of(2, features=9)[0])  # a local model raises here, and moves no average
    f.eval()
    z = f(shards_of(3)[0])
    with pytest.raises(ModelCallFailed):
        z.sum() if read == "a later call" else f.buffers
    assert z.isfinite().all()
    assert torch.equal(f.buffers["average"], before)


def test_an_error_of_the_replay_comes_out_of_backward(
    client: GradClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradbox_service.admission import earlier_job

    loss = client.model("mlp")(shards_of(2)[0]).sum()

    def gone(path: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(earlier_job, "checked_header", gone)
    with pytest.raises(InvalidInputs, match="run the forward job again"):
        loss.backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_a_custom_function_is_never_silently_wrong(client: GradClient) -> None:
    (x,) = shards_of(4)
    f, naive = client.model("mlp"), NaiveModel(case_models.mlp())
    with pytest.raises((InvalidInputs, RuntimeError), match="clone"):
        Doubled.apply(f(x)).sum().backward()
    assert f.grads == {}
    for model in (f, naive):
        Doubled.apply(model(x).clone()).sum().backward()
    assert difference(f.grads, naive.grads) <= TOLERANCE


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda f: f(), "got none"),
        (lambda f: f(torch.ones(2, 5), torch.ones(2, 5)), "2 by position"),
        (lambda f: f(torch.ones(2, 5), nothing=torch.ones(2)), "nothing"),
        (lambda f: f("text"), "expected"),
    ],
)
def test_a_call_that_does_not_fit_fails_at_its_line(
    client: GradClient, call: Callable[[Any], Any], says: str
) -> None:
    with pytest.raises(InvalidInputs, match=says):
        call(client.model("mlp"))


def test_a_call_under_a_transform_is_refused_and_spoils_nothing(client: GradClient) -> None:
    (x,) = shards_of(4)
    f = client.model("mlp")
    with pytest.raises(InvalidInputs, match="transform"):
        torch.func.vmap(f)(x)
    assert f(x).isfinite().all()


def test_what_is_not_there_says_what_is(client: GradClient) -> None:
    f = client.model("mlp")
    with pytest.raises(AttributeError, match="forward"):
        f.parameters()
    with pytest.raises(UnknownModel):
        client.model("nope")


@pytest.mark.parametrize("retain", ["auto", 0])
def test_a_call_leaves_alone_what_another_calls_inputs_were_computed_from(
    client: GradClient, retain: int | str
) -> None:
    x, y = shards_of(4, 3)
    lift = nn.Linear(3, 5).double()
    f, g = client.model("mlp", retain=retain), client.model("inplace_mlp", retain=retain)
    chained, beside = g(lift(f(x))), g(y)
    beside.square().sum().backward()
    assert f.grads == {}
    assert lift.weight.grad is None
    chained.square().sum().backward()
    first, second = NaiveModel(case_models.mlp()), NaiveModel(case_models.inplace_mlp())
    loss = second(lift(first(x))).square().sum() + second(y).square().sum()
    loss.backward()
    assert difference(f.grads, first.grads) <= TOLERANCE
    assert difference(g.grads, second.grads) <= TOLERANCE


def test_a_backward_pass_through_a_model_that_was_reloaded_says_to_call_it_again(
    tmp_path: Path,
) -> None:
    models, code = tmp_path / "models.toml", tmp_path / "scaled.py"
    models.write_text('[models.scaled]\nbuilder = "python"\nsource = "scaled.py:build"\n')
    lines = "from torch import nn\n\ndef build():\n    return nn.Linear(3, {}, bias=False)\n"
    code.write_text(lines.format(2))
    with twin_box(tmp_path / "data", models=models) as box, box.client() as client:
        z = client.model("scaled")(torch.ones(2, 3)).sum()
        code.write_text(lines.format(4))
        with box.client(box.owner_token) as owner:
            owner.reload_models()
        with pytest.raises(UnknownModel, match="call the model again"):
            z.backward()
