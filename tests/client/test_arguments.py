"""What no job can have is refused in a sentence; what one can have is read in any form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbox import (
    Cotangents,
    Forward,
    GradboxError,
    GradClient,
    Gradient,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobNotFound,
    Penalty,
    PerSampleGradient,
    UnknownModel,
)
from tests.boxes import TestBox
from tests.client import zoo
from tests.client.test_per_sample import normal

X = normal(5, 5)


def total(z: Tensor, **others: Tensor) -> Tensor:
    return sum(others.values(), z.square().sum())


def gradient(**given: Any) -> Gradient:
    return Gradient(**({"model": "mlp", "inputs": [X], "loss": total} | given))


@pytest.mark.parametrize(
    "given",
    [
        {"wrt": 3},
        {"returns": 3},
        {"method": 3},
        {"method": {3: "forward", "z": "forward", "y": "forward"}},
        {"loss_inputs": {"": X}},
        {"loss_inputs": {3: X}},
        {"loss_inputs": {"a" * 101: X}},
        {"loss_inputs": {"a.b": X}},
        {"loss_inputs": {"a": np.longdouble(1.5)}},
        {"loss_inputs": {"a": np.complex64(1j)}},
        {"weights": {3: X}},
        {"weights": {"": X}},
        {"order": [0.9, 1.9, 2.9, 3.9, 4.9]},
        {"order": [None] * 5},
        {"order": "abcde"},
        {"order": [2**70]},
        {"order": [[0, 1], [2]]},
        {"inputs": [np.ma.masked_array(np.eye(5), mask=True)]},
        {"inputs": {"ü": [X]}},
    ],
    ids=lambda given: f"{given}"[:40],
)
def test_what_no_job_can_have_is_refused_before_it_is_sent(given: dict[str, Any]) -> None:
    with pytest.raises((InvalidInputs, InvalidJob), match=r"expected|valid|Input should be"):
        gradient(**given).prepare()


def test_an_error_within_a_constructor_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        GradClient("http://127.0.0.1:1", "t", timeout_s=None).jobs()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("a fox", "got str; tokenise texts"),
        (["a fox"], "got str 'a fox'; tokenise texts"),
        ({"queries": ["a fox"], "docs": [X]}, "group 'queries': .* tokenise texts"),
        ([{"ids": ["a fox", "the sea"]}], "argument 'ids': .* tokenise texts"),
        ([np.array(["a fox"])], "tokenise texts"),
        ([{"ids": X, "mask": None}], "argument 'mask': .* got None; leave it out"),
        ([X, None], "shard 1 .* got None; leave it out"),
    ],
    ids=str,
)
def test_what_is_no_shard_is_told_what_to_do(inputs: Any, said: str) -> None:
    with pytest.raises(InvalidInputs, match=said):
        gradient(inputs=inputs)


@pytest.mark.parametrize("form", [list, iter, dict.fromkeys, lambda found: next(iter(found))])
def test_parameters_are_no_names_of_them(form: Callable[..., Any]) -> None:
    layer = torch.nn.Linear(5, 3)
    for make in (Jacobian, Forward):
        job = make(model="mlp", inputs=[X], wrt=form(layer.parameters()))
        with pytest.raises(InvalidInputs, match=r"wrt: .*a (Parameter|Tensor); write \[name for"):
            job.prepare()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("given", "called"),
    [
        ({"loss": lambda z: z.sum(), "loss_inputs": {"y": X}}, "all loss_inputs go by their names"),
        ({"readout": lambda output: output}, r"called as readout\(output, inputs\)"),
        ({"penalties": [Penalty(at="0", loss=lambda tap, z: z.sum())]}, "with one tensor"),
    ],
)
def test_a_function_of_other_arguments_is_told_how_it_is_called(
    given: dict[str, Any], called: str
) -> None:
    with pytest.raises(InvalidInputs, match=called):
        gradient(**given).prepare()


def test_a_nested_tensor_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputs, match="got a nested one"):
        gradient(inputs=[torch.nested.nested_tensor([X[0], X[1]])])


@pytest.mark.parametrize("tensors", [{}, None, [X], "abc", {3: X}])
def test_cotangents_of_no_such_form_are_refused(tensors: Any) -> None:
    with pytest.raises(InvalidInputs, match="expected"):
        Gradient(loss=Cotangents(tensors, of="job")).prepare()


@pytest.mark.parametrize("of", ["", "a/b", 3, None])
def test_what_is_no_job_is_refused(of: Any) -> None:
    with pytest.raises(InvalidJob, match="expected a job, its result or its id"):
        Cotangents(X, of=of)


def test_empty_lists_beside_cotangents_are_none_given(twin: TestBox) -> None:
    forward = twin.result_of(Forward(model="mlp", inputs=[X]))
    loss = Cotangents(torch.ones(5, 3), of=forward)
    assert twin.result_of(Gradient(loss=loss, penalties=[], weights={})).names


@pytest.mark.parametrize("weights", [3, "abc", {3: X}, {"0.bias": [1.0]}])
def test_a_remote_model_s_weights_are_tensors_by_name(twin: TestBox, weights: Any) -> None:
    with twin.client() as client, pytest.raises(InvalidInputs, match="expected"):
        client.model("mlp", weights=weights)(X).sum()


def test_an_error_names_fields_without_the_insides_of_a_union() -> None:
    with pytest.raises(InvalidJob, match=r"^retain: Input.* or a number is needed"):
        gradient(retain="1GB").prepare()


@pytest.mark.parametrize("name", ["self", "function", "args", "kwargs", "call", "device"])
def test_a_loss_input_may_have_any_argument_s_name(twin: TestBox, name: str) -> None:
    found = twin.result_of(gradient(loss_inputs={name: torch.tensor(2.5)}))
    assert found.loss == pytest.approx(twin.result_of(gradient()).loss + 2.5)


def test_a_loss_input_may_be_called_as_an_unnamed_group_is(twin: TestBox) -> None:
    def loss(out: Tensor, z: Tensor) -> Tensor:
        return total(out) + z

    found = twin.result_of(gradient(loss=loss, loss_inputs={"z": torch.tensor(2.5)}))
    assert found.loss == pytest.approx(twin.result_of(gradient()).loss + 2.5)


def test_a_tensor_under_a_transform_of_torch_func_is_refused(twin: TestBox) -> None:
    with pytest.raises(InvalidInputs, match=r"argument '0': .*vmap, grad.*PerSampleGradient"):
        torch.func.vmap(lambda x: twin.result_of(gradient(inputs=[x[None]])).grads["0.bias"])(X)


def test_a_tensor_that_is_written_to_while_it_is_sent_is_told_from_damage(twin: TestBox) -> None:
    x = X.clone()
    submission = gradient(inputs=[x]).prepare()
    x.add_(1)
    with twin.client() as client, pytest.raises(InvalidInputs, match="another thread writes"):
        client._send(submission)


def _written(z: Tensor) -> Tensor:
    out = torch.zeros(2, dtype=z.dtype)
    out[0] = z.detach().sum()
    return out.sum()


def _without_grad(z: Tensor) -> Tensor:
    with torch.no_grad():
        return z.sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: torch.ones(()),
        lambda z: z.detach().sum(),
        lambda z: (z.argmax(1) == 1).float().mean(),
        _written,
        _without_grad,
    ],
)
def test_a_loss_without_a_derivative_is_refused_on_the_box(twin: TestBox, loss: Any) -> None:
    with twin.client() as client:
        job = client.submit(gradient(loss=loss))
        with pytest.raises(InvalidInputs, match="loss: expected numbers that can be diff"):
            job.result(60)


@pytest.mark.parametrize("model", [torch.nn.Linear(5, 3), None, 3])
def test_a_model_is_named(twin: TestBox, model: Any) -> None:
    expected = f"expected the name of a model on the box.*got '?{type(model).__name__}"
    with pytest.raises(InvalidJob, match=expected):
        gradient(model=model).prepare()
    with twin.client() as client, pytest.raises(UnknownModel, match=expected):
        client.model(model)


def test_gradients_are_applied_to_a_module_and_found_by_name(twin: TestBox) -> None:
    found, weight = twin.result_of(gradient()), torch.nn.Parameter(torch.ones(2))
    with pytest.raises(InvalidInputs, match=r"expected the nn\.Module .*got SGD; an optimizer"):
        found.apply_to(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(KeyError, match="grads: a Parameter is none of its 6 names"):
        found.grads[weight]


@pytest.mark.parametrize("job_id", ["", 3, None, "a/b", "../jobs"])
def test_what_is_no_id_of_a_job_is_refused(twin: TestBox, job_id: Any) -> None:
    with twin.client() as client, pytest.raises(JobNotFound, match="expected the id of a job"):
        client.job(job_id)


def test_rows_in_an_order_are_refused_without_the_insides_of_the_spec() -> None:
    job = PerSampleGradient(
        model="mlp", inputs=[X], loss=lambda z: z.square().sum(1), order=torch.arange(len(X))
    )
    with pytest.raises(InvalidJob, match=r"^inputs: .*, got one with: [^(\[{]*leave order out"):
        job.prepare()


def test_fractions_are_no_order(twin: TestBox) -> None:
    with pytest.raises(GradboxError, match="expected order to be whole numbers"):
        twin.result_of(gradient(order=torch.arange(5) + 0.5))


@pytest.mark.parametrize(
    "given",
    [
        {"reduce": "vjp", "vectors": torch.ones(5, 3, dtype=torch.complex64)},
        {"reduce": "jvp", "vectors": {"0.bias": torch.ones(8, dtype=torch.complex64)}},
    ],
    ids=["vjp", "jvp"],
)
def test_complex_vectors_are_refused(twin: TestBox, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputs, match=r"vectors.*expected real numbers, got C64"):
        twin.result_of(Jacobian(model="mlp", inputs=[X], **given))


FORMS: list[Callable[[Tensor], Any]] = [
    lambda t: t.numpy(),
    lambda t: t.numpy().astype(">f8"),
    lambda t: np.asfortranarray(t.numpy()),
    lambda t: t.numpy()[::-1].copy()[::-1],
    lambda t: t.clone().requires_grad_(),
]


@pytest.mark.parametrize("form", FORMS, ids=["numpy", "big-endian", "column-major", "-1", "leaf"])
def test_rows_are_multiplied_with_tensors_and_arrays(
    twin: TestBox, form: Callable[[Tensor], Any]
) -> None:
    result = twin.result_of(Jacobian(model="mlp", inputs=[X], form="factored"))
    tangents = {name: normal(*rows.shape[2:]) for name, rows in result.grads.items()}
    found = result.jvp({name: form(tangent) for name, tangent in tangents.items()})
    assert torch.equal(found, result.jvp(tangents))
    cotangents = normal(5, 3)
    for name, found in result.vjp(form(cotangents)).items():
        assert torch.equal(found, result.vjp(cotangents)[name])


def test_rows_are_not_multiplied_with_anything_else(twin: TestBox) -> None:
    result = twin.result_of(Jacobian(model="mlp", inputs=[X]))
    wrong: list[Callable[[], Any]] = [
        lambda: result.jvp(torch.ones(8)),  # type: ignore[arg-type]
        lambda: result.jvp({"0.bias": [1.0] * 8}),
        lambda: result.jvp({"0.bias": torch.ones(8) * 1j}),
        lambda: result.jvp({"0.bias": np.array(["a"] * 8)}),
        lambda: result.vjp([[1.0] * 3] * 5),
        lambda: result.vjp(np.ones((5, 3)) * 1j),
    ]
    for call in wrong:
        with pytest.raises(InvalidInputs, match="expected"):
            call()


@pytest.mark.parametrize(
    "given",
    [
        {"dim": 2.5},
        {"dim": "3"},
        {"dim": True},
        {"dim": 4, "seed": -1},
        {"dim": 4, "seed": 1.5},
        {"dim": 4, "seed": "a"},
        {"dim": 4, "kind": "x"},
    ],
    ids=str,
)
def test_a_projection_here_refuses_what_the_box_refuses(
    twin: TestBox, given: dict[str, Any]
) -> None:
    result = twin.result_of(Jacobian(model="mlp", inputs=[X]))
    with pytest.raises(InvalidJob, match="expected"):
        result.projection(**given)


def test_parameters_without_entries_have_rows_without_entries(twin: TestBox) -> None:
    x, model = normal(5, 4), zoo.empty()
    z = model(x).square().sum(1)
    for form in ("dense", "factored"):
        job = PerSampleGradient(model="empty", inputs=[x], loss=squares, form=form)  # type: ignore[arg-type]
        result = twin.result_of(job)
        for name, parameter in model.named_parameters():
            rows = torch.stack(
                [torch.autograd.grad(z[b], parameter, retain_graph=True)[0] for b in range(5)]
            )
            assert result.grads[name].shape == rows.shape
            assert torch.allclose(result.grads[name][:], rows, rtol=1e-10)
        assert torch.allclose(result.gram(), result.flat() @ result.flat().T)
        for kind in ("sketch", "gaussian"):
            assert result.projection(4, kind=kind).shape == (5, 4)  # type: ignore[arg-type]
        tangents = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        v = torch.cat([tangents[name].flatten() for name in result.names])
        assert torch.allclose(result.jvp(tangents), result.flat() @ v)
        assert result.vjp(torch.ones(5))["no_columns"].shape == (3, 0)


def squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def test_a_shard_without_samples_is_refused_by_its_shape(twin: TestBox) -> None:
    with pytest.raises(GradboxError, match=r"expected a shard with samples, got .*\(0, 5\)"):
        twin.result_of(Jacobian(model="mlp", inputs=[X[:0], X]))


def test_an_output_without_a_row_for_each_sample_is_refused_as_that(twin: TestBox) -> None:
    with pytest.raises(GradboxError, match=r"so that the output has . rows"):
        twin.result_of(Jacobian(model="mlp", inputs=[X], readout=lambda z, inputs: z[:2]))
