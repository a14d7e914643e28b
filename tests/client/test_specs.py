"""What a posted spec's fields may be: a boolean is no number, and a string is none either."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gradbox import InvalidJob
from gradbox.protocol import parse_posted, parse_spec

SHARD = {"blob": "0" * 64}
FUNCTION = {"graph": {"nodes": [{"op": "output", "name": "o", "target": "o", "args": [None]}]}}
GRADIENT: dict[str, Any] = {
    "computation": "gradient",
    "model": "m",
    "inputs": [{"shards": [SHARD]}],
    "loss": {"kind": "builtin", "name": "info_nce"},
}
PER_SAMPLE = {
    **GRADIENT,
    "computation": "per_sample_gradient",
    "loss": {"kind": "graph", "function": FUNCTION},
    "reduce": "clipped_sum",
}
JACOBIAN = {"computation": "jacobian", "model": "m", "inputs": [{"shards": [SHARD]}]}
LEAF = {**SHARD, "tensor": "t", "requires_grad": True}
COTANGENTS: dict[str, Any] = {
    "computation": "gradient",
    "loss": {"kind": "cotangents", "forward": "j1", "tensors": {"z": {**SHARD, "tensor": "z"}}},
}


def posted(base: dict[str, Any], **fields: Any) -> Any:
    return parse_posted(json.dumps({**base, **fields}).encode())


@pytest.mark.parametrize("value", [True, False, "1"])
@pytest.mark.parametrize(
    ("base", "field"),
    [
        *((GRADIENT, name) for name in ("timeout_s", "seed", "priority", "retain", "protocol")),
        *((COTANGENTS, name) for name in ("timeout_s", "priority", "protocol")),
        (PER_SAMPLE, "clip"),
    ],
)
def test_a_boolean_or_a_string_is_no_number(base: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(InvalidJob, match=field):
        posted(base, **{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"output": True},
        {"inputs": [{"shards": [{**SHARD, "stream": [True, 0]}]}]},
        {"inputs": [{"shards": [{**SHARD, "stream": [0, "0"]}]}]},
        {"penalties": [{"at": "x", "loss": FUNCTION, "weight": True}]},
        {"loss_inputs": {"labels": {**SHARD, "tensor": "l", "requires_grad": 1}}},
    ],
)
def test_nor_is_one_deeper_in_a_spec(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob):
        posted(GRADIENT, **fields)


def test_numbers_stay_numbers_and_scalars_of_a_loss_keep_their_kind() -> None:
    spec = posted(GRADIENT, timeout_s=5, seed=2**62, retain=10, loss_inputs={"a": True, "b": 1})
    assert (spec.timeout_s, spec.seed, spec.retain) == (5.0, 2**62, 10)
    assert spec.loss_inputs["a"] is True
    assert spec.loss_inputs["b"] == 1
    assert parse_spec(spec.model_dump_json()) == spec


def test_what_was_given_is_said_once() -> None:
    with pytest.raises(InvalidJob) as caught:
        posted(PER_SAMPLE)
    assert str(caught.value).count("None") == 1
    with pytest.raises(InvalidJob, match=r"\(got 'often'\)"):
        posted(GRADIENT, mode="often")


def test_a_value_that_fits_no_kind_is_said_once() -> None:
    with pytest.raises(InvalidJob) as caught:
        posted(GRADIENT, loss_inputs={"labels": [1, 2]})
    assert str(caught.value).count("loss_inputs.labels") == 1
    assert "or a valid integer or a valid number" in str(caught.value)


def test_a_kind_that_is_left_out_is_asked_for_by_its_field() -> None:
    with pytest.raises(InvalidJob, match="the body: expected a field 'computation'"):
        parse_posted(b'{"model": "m"}')
    with pytest.raises(InvalidJob, match="loss: expected a field 'kind'"):
        posted(GRADIENT, loss={"name": "info_nce"})


@pytest.mark.parametrize(
    "text",
    [
        '{"seed": 1, %s, "seed": 1}',
        '{"loss_inputs": {"a": 1, "\\u0061": 2}, %s}',
    ],
)
def test_a_name_that_comes_twice_is_refused(text: str) -> None:
    fields = json.dumps(GRADIENT)[1:-1]
    with pytest.raises(InvalidJob, match=r"each name once in an object, got '(seed|a)'"):
        parse_posted((text % fields).encode())


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        (GRADIENT, {"weights": {"w": LEAF}}),
        (GRADIENT, {"inputs": [{"shards": [SHARD], "order": LEAF}]}),
        (COTANGENTS, {"loss": {**COTANGENTS["loss"], "tensors": {"z": LEAF}}}),
        (JACOBIAN, {"reduce": "vjp", "vectors": LEAF}),
        (JACOBIAN, {"reduce": "jvp", "vectors": {"w": LEAF}}),
    ],
)
def test_what_has_no_gradient_cannot_require_one(
    base: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidJob, match="no gradient of this tensor is computed"):
        posted(base, **fields)
    posted(base, **json.loads(json.dumps(fields).replace("true", "false")))
