"""Mixed gradients through `GradClient`, on the in-process twin and on a real box alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradbox import InvalidInputs, LossNotScalar, MixedGradient, UntraceableLoss
from gradbox.protocol import MixedGradientSpec, parse_spec
from tests.boxes import TestBox
from tests.mixed_cases import MIXED_CASES, OBSTACLES, TOLERANCE, MixedCase, double_backward
from tests.oracle import difference

WAIT_S = 120.0

REMOTE = {
    "mlp, cubic": "mixed_inplace_mlp",
    "mlp, all shards coupled": "mixed_inplace_mlp",
    "mlp, outer reads y": "mixed_inplace_mlp",
    "cnn in train": "mixed_cnn",
    "generator in eval": "mixed_generator",
    "generator under a critic": "mixed_generator",
    "transformer": "mixed_transformer",
    "lstm and gru": "mixed_recurrent",
}


def mixed(case: MixedCase, model: str, **given: Any) -> MixedGradient:
    told = {
        "model": model,
        "inputs": case.shards,
        "inner": case.inner,
        "outer": case.outer,
        "y": case.y,
        "x": case.x,
        "z": case.z,
        "output": case.output,
        "readout": case.readout,
        "mode": case.mode,
        "seed": case.seed,
    }
    return MixedGradient(**(told | given))


@pytest.mark.parametrize("name", REMOTE)
def test_a_job_returns_what_double_backward_computes(box: TestBox, name: str) -> None:
    case = MIXED_CASES[name]()
    expected = double_backward(MIXED_CASES[name]())
    # What a module does not use is not traced.
    expected.grads.pop("inner.unused", None)
    with box.client() as client:
        job = client.submit(mixed(case, REMOTE[name], returns=("grads", "dfdz")))
        result = job.result(WAIT_S)
    assert result.loss == pytest.approx(expected.value, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    torch.testing.assert_close(result.dfdz, expected.dfdz, rtol=TOLERANCE, atol=TOLERANCE)
    assert result.manifest.computation == "mixed_gradient"
    assert result.manifest.fallbacks == {}
    assert result.manifest.shards == {"z": len(case.shards)}


def test_the_receipt_names_what_forward_mode_could_not_pass(twin: TestBox) -> None:
    case = OBSTACLES["_weight_norm_interface"]()
    expected = double_backward(OBSTACLES["_weight_norm_interface"]())
    result = twin.result_of(mixed(case, "mixed_normed"))
    assert result.manifest.fallbacks == {"_weight_norm_interface": 3}
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert result.dfdz is None


def test_a_critic_takes_its_gradients(twin: TestBox) -> None:
    case = MIXED_CASES["generator under a critic"]()
    assert isinstance(case.inner, nn.Module)
    result = twin.result_of(mixed(case, "mixed_generator"))
    result.apply_to(case.inner, prefix="inner.")
    torch.testing.assert_close(case.inner.conv.weight.grad, result.grads["inner.conv.weight"])
    assert set(result.manifest.unreached) == {"inner.head.bias"}


def test_plain_numbers_become_part_of_the_functions(twin: TestBox) -> None:
    case = MIXED_CASES["mlp, cubic"]()

    def inner(y: Tensor, power: int, v: Tensor) -> Tensor:
        return (v**power @ y).sum()

    def outer(dfdz: Tensor, scale: float) -> Tensor:
        return dfdz.square().sum() * scale

    numbers = {"inner": inner, "outer": outer, "x": {"scale": np.float32(0.5)}}
    job = mixed(case, "mixed_inplace_mlp", y={**case.y, "power": 3}, **numbers)
    plain = mixed(
        case,
        "mixed_inplace_mlp",
        inner=lambda y, v: (v**3 @ y).sum(),
        outer=lambda dfdz: dfdz.square().sum() * 0.5,
    )
    found, expected = (twin.result_of(each) for each in (job, plain))
    assert difference(found.grads, expected.grads) <= TOLERANCE


def _two(y: Tensor, v: Tensor) -> Tensor:
    return v.flatten(1).sum(1)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an integer z": ({"inputs": [torch.arange(5)[None]], "z": None}, InvalidInputs, "no derivat"),
    "a z that is not there": ({"z": "images"}, InvalidInputs, r"\['0'\], got 'images'"),
    "nothing to differentiate by": (
        {"y": {}, "inner": lambda v: v.sum()},
        InvalidInputs,
        "expected something to differentiate by",
    ),
    "a name in y and in x": (
        {"x": {"y": torch.ones(3)}, "outer": lambda dfdz, y: dfdz.sum() * y.sum()},
        InvalidInputs,
        r"\['y'\] in both",
    ),
    "y without a name": ({"y": torch.ones(3)}, InvalidInputs, "y: expected {name: tensor"),
    "inner with many values": ({"inner": _two}, LossNotScalar, "inner: expected"),
    "a branch on values": (
        {"outer": lambda dfdz: dfdz.sum() if dfdz.sum() > 0 else -dfdz.sum()},
        UntraceableLoss,
        "torch.where",
    ),
    "two groups": (
        {"inputs": {"a": [torch.ones(1, 5)], "b": [torch.ones(1, 5)]}},
        Exception,
        "at most 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(twin: TestBox, name: str) -> None:
    given, error, message = REFUSED[name]
    case = MIXED_CASES["mlp, cubic"]()
    with twin.client() as client, pytest.raises(error, match=message):
        client.submit(mixed(case, "mixed_inplace_mlp", **given)).result(WAIT_S)


def _without(name: str) -> Any:
    return lambda spec: spec | {name: {}}


POSTED: dict[str, tuple[Any, str]] = {
    "inner without y": (_without("y"), "inner: expected the members of y"),
    "outer without x": (_without("x"), "outer: expected dfdz first"),
    "an x too many": (
        lambda spec: spec | {"x": spec["x"] | {"more": spec["x"]["target"]}},
        "outer: expected dfdz first",
    ),
    "a name in both": (
        lambda spec: spec | {"x": spec["x"] | {"y": spec["y"]["y"] | {"requires_grad": False}}},
        r"in both",
    ),
    "a constant that requires grad": (
        lambda spec: spec | {"x": {"y": spec["y"]["y"]}},
        "x.y: no gradient of this tensor is computed",
    ),
    "nothing that requires grad": (
        lambda spec: spec | {"y": {"y": spec["y"]["y"] | {"requires_grad": False}}},
        "something to differentiate by",
    ),
    "wrt": (lambda spec: spec | {"wrt": ["*"]}, "wrt"),
    "a tensor that is not there": (
        lambda spec: spec | {"y": {"y": spec["y"]["y"] | {"tensor": "elsewhere"}}},
        "no tensor 'elsewhere'",
    ),
}


@pytest.mark.parametrize("name", POSTED)
def test_what_is_posted_by_hand_is_checked(twin: TestBox, name: str) -> None:
    change, message = POSTED[name]
    case = MIXED_CASES["mlp, all shards coupled"]()
    prepared = mixed(case, "mixed_inplace_mlp").prepare()
    with twin.http() as http:
        for blob in prepared.blobs:
            body = b"".join(bytes(piece) for piece in blob.chunks())
            http.put(f"/v1/blobs/{blob.digest}", content=body).raise_for_status()
        good = prepared.spec.model_dump(mode="json")
        answer = http.post("/v1/jobs", json=change(good))
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_a_spec_survives_the_wire() -> None:
    spec = mixed(MIXED_CASES["mlp, outer reads y"](), "m").prepare().spec
    assert isinstance(spec, MixedGradientSpec)
    assert parse_spec(spec.model_dump_json()) == spec
    assert spec.y["y"].requires_grad


def test_z_is_the_first_floating_point_argument_that_was_given() -> None:
    case = MIXED_CASES["mlp, cubic"]()
    shard = {"tokens": torch.ones(1, 5).long(), "later": torch.ones(1, 5), "first": torch.ones(1)}
    spec = mixed(case, "m", inputs=[shard], z=None).prepare().spec
    assert isinstance(spec, MixedGradientSpec)
    assert spec.z == "later"


@pytest.mark.parametrize("body", [{"computation": "hessian"}, '{"computation": "hessian"}'])
def test_an_unknown_computation_is_refused(body: Any) -> None:
    with pytest.raises(Exception, match="hessian"):
        parse_spec(body)
