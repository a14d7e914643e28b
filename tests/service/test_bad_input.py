"""Jobs that cannot run are refused when they are posted, with a message that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from gradbox_service.settings import Settings
from tests.service.boxes import SHARDS, VERSION, announce, ones, spec_for, upload
from tests.service.conftest import Box, client_with, serve
from tests.valkey import empty_backing


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    data = tmp_path_factory.mktemp("data")
    yield from serve(empty_backing(data), Settings(data=data, max_spec_bytes=50_000))


@pytest.fixture(scope="module")
def blob(box: Box) -> str:
    """A blob with shards of every kind that the tests need."""
    tensors = SHARDS | {
        "masked/x": ones(2, 2),
        "masked/mask": ones(2, 2),
        "wrong/tokens": ones(2, 2),
        "several/ids": ones(2, 2),
        "several/mask": ones(2, 2),
        "positions/0": ones(2, 2),
        "positions/1": ones(2, 2),
        "too-many/0": ones(1),
        "too-many/1": ones(1),
        "too-many/2": ones(1),
        "gap/0": ones(1),
        "gap/2": ones(1),
        "both/0": ones(1),
        "both/x": ones(1),
        "odd/x-y": ones(1),
        "2/01": ones(1),
        "weight": ones(2, 2),
    }
    return upload(box.client, tensors)


def shards(blob: str, *prefixes: str) -> list[dict[str, Any]]:
    return [{"shards": [{"blob": blob, "prefix": prefix} for prefix in prefixes]}]


def refused(box: Box, spec: Any, *, code: str, status: int = 422) -> str:
    """Post a job that must be refused, and return the detail."""
    kind = {"content": spec} if isinstance(spec, bytes) else {"json": spec}
    answer = box.client.post("/v1/jobs", **kind)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == f"urn:gradbox:problem:{code}", problem
    assert problem["category"] == "user"
    assert problem["request_id"] == answer.headers["x-request-id"]
    return str(problem["detail"])


def accepted(box: Box, spec: dict[str, Any]) -> None:
    answer = box.client.post("/v1/jobs", json=spec)
    assert answer.status_code == 202, answer.text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b'{"computation": "gradient", "model": "tiny"}', "inputs: Field required"),
        (
            b'{"computation": "gradient", "model": "tiny", "inputs": [], "loss": {}}',
            "inputs: List should have at least 1",
        ),
        (b'{"model": "tiny", "inputs": [], "loss": {}}', "computation"),
        (b"[" * 10_000, "JSON"),
    ],
)
def test_a_body_that_is_no_job_names_the_field(box: Box, body: bytes, says: str) -> None:
    assert says in refused(box, body, code="invalid-job")


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_a_number_that_is_not_finite_is_refused(box: Box, blob: str, number: str) -> None:
    text = json.dumps(spec_for(blob, loss_inputs={"margin": 123.5})).replace("123.5", number)
    assert "loss_inputs.margin" in refused(box, text.encode(), code="invalid-job")


def test_text_that_is_no_unicode_is_refused(box: Box, blob: str) -> None:
    text = json.dumps(spec_for(blob, name="\ud800"))
    refused(box, text.encode(), code="invalid-job")


def test_an_unknown_field_is_refused(box: Box, blob: str) -> None:
    assert "sede" in refused(box, spec_for(blob, sede=1), code="invalid-job")


def test_a_body_over_the_limit_is_refused(box: Box) -> None:
    refused(box, b" " * 60_000, code="blob-too-large", status=413)


def test_an_empty_list_of_shards_is_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=[{"shards": []}])
    assert "inputs.0.shards" in refused(box, spec, code="invalid-job")


def test_an_unknown_model_is_refused_with_those_there_are(box: Box, blob: str) -> None:
    detail = refused(box, spec_for(blob, model="tony"), code="unknown-model")
    assert "'tony'" in detail
    assert "did you mean 'tiny'?" in detail


@pytest.mark.parametrize("version", ["b" * 64, "a1a1a1a", ""])
def test_an_unknown_version_is_refused(box: Box, blob: str, version: str) -> None:
    detail = refused(box, spec_for(blob, model=f"tiny@{version}"), code="unknown-model")
    assert VERSION[:16] in detail


@pytest.mark.parametrize("version", [VERSION, VERSION[:8]])
def test_a_version_may_be_given(box: Box, blob: str, version: str) -> None:
    accepted(box, spec_for(blob, model=f"tiny@{version}"))


def test_an_entry_point_that_the_registry_does_not_allow_is_refused(box: Box, blob: str) -> None:
    groups = [{"shards": [{"blob": blob, "prefix": "0/"}], "method": "state_dict"}]
    detail = refused(box, spec_for(blob, inputs=groups), code="invalid-inputs")
    assert "['embed', 'forward', 'stack']" in detail


def test_missing_blobs_are_listed(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=shards("0" * 64, ""), loss_inputs={})
    spec["weights"] = {"layer.bias": {"blob": "1" * 64, "tensor": "b"}}
    answer = box.client.post("/v1/jobs", json=spec)
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("missing-blobs")
    assert answer.json()["missing"] == ["0" * 64, "1" * 64]


def test_a_prefix_that_no_tensor_has_is_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=shards(blob, "0/", "nope/"))
    detail = refused(box, spec, code="invalid-inputs")
    assert "shard 1 of group 'z'" in detail
    assert "'nope/'" in detail


def test_shards_with_different_names_are_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=shards(blob, "0/", "1/", "masked/"))
    detail = refused(box, spec, code="invalid-inputs")
    assert "shard 2 of group 'z' has the arguments ['mask', 'x'], expected ['x']" in detail


def test_a_wrong_argument_name_is_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=shards(blob, "wrong/"))
    detail = refused(box, spec, code="invalid-inputs")
    assert "tiny.forward(x, mask) has no argument ['tokens']" in detail


@pytest.mark.parametrize(
    ("prefix", "method", "says"),
    [
        ("too-many/", "forward", "got 3 by position; labels and"),
        ("gap/", "forward", "without a gap, got [0, 2]"),
        ("both/", "forward", "given by position and by name ['x']"),
        ("odd/", "embed", "is an identifier or a whole number, got ['x-y']"),
        ("2/", "embed", "is an identifier or a whole number, got ['01']"),
        ("wrong/", "embed", "missing ['x']"),
        ("several/", "embed", "if that argument is a dict of these"),
        ("", "forward", "is an identifier or a whole number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    box: Box, blob: str, prefix: str, method: str, says: str
) -> None:
    groups = shards(blob, prefix)
    groups[0]["method"] = method
    assert says in refused(box, spec_for(blob, inputs=groups), code="invalid-inputs")


@pytest.mark.parametrize(
    ("prefix", "method"),
    [
        ("masked/", "forward"),
        ("positions/", "forward"),
        ("masked/", "embed"),
        ("too-many/", "stack"),
    ],
)
def test_arguments_that_fit_are_accepted(box: Box, blob: str, prefix: str, method: str) -> None:
    groups = shards(blob, prefix)
    groups[0]["method"] = method
    accepted(box, spec_for(blob, inputs=groups))


def test_two_groups_of_one_name_are_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, inputs=shards(blob, "0/") + shards(blob, "1/"))
    assert "['z'] more than once" in refused(box, spec, code="invalid-inputs")


def test_one_of_several_groups_and_a_loss_input_of_one_name_are_refused(
    box: Box, blob: str
) -> None:
    spec = spec_for(blob)
    spec["inputs"] = [{**spec["inputs"][0], "name": name} for name in ("labels", "others")]
    assert "['labels']" in refused(box, spec, code="invalid-inputs")


def test_a_tensor_that_the_blob_lacks_is_refused(box: Box, blob: str) -> None:
    spec = spec_for(blob, loss_inputs={"labels": {"blob": blob, "tensor": "label"}})
    detail = refused(box, spec, code="invalid-inputs")
    assert "loss_inputs.labels" in detail
    assert "has no tensor 'label'" in detail


@pytest.mark.parametrize("glob", ["encoder.*", "inputs.y", "inputs.z.y", "loss_inputs.labels"])
def test_a_glob_that_matches_nothing_is_refused(box: Box, blob: str, glob: str) -> None:
    detail = refused(box, spec_for(blob, wrt=["layer.*", glob]), code="invalid-inputs")
    assert repr(glob) in detail


@pytest.mark.parametrize("glob", ["inputs.x", "inputs.z.x", "inputs.*"])
def test_globs_may_name_floating_point_inputs(box: Box, blob: str, glob: str) -> None:
    accepted(box, spec_for(blob, wrt=[glob]))


def test_globs_may_name_parameters_and_what_the_loss_reads(box: Box, blob: str) -> None:
    labels = {"labels": {"blob": blob, "tensor": "labels", "requires_grad": True}}
    wrt = ["layer.w*", "loss_inputs.labels"]
    accepted(box, spec_for(blob, wrt=wrt, loss_inputs=labels))


def test_weights_of_an_unknown_name_are_refused(box: Box, blob: str) -> None:
    weights = {"layer.wieght": {"blob": blob, "tensor": "weight"}}
    detail = refused(box, spec_for(blob, weights=weights), code="invalid-inputs")
    assert "there is 'layer.weight'" in detail


def test_weights_of_another_shape_are_refused(box: Box, blob: str) -> None:
    weights = {"layer.bias": {"blob": blob, "tensor": "weight"}}
    detail = refused(box, spec_for(blob, weights=weights), code="invalid-inputs")
    assert "expected the shape [2], got [2, 2]" in detail


@pytest.mark.parametrize("name", ["layer.weight"])
def test_weights_that_fit_are_accepted(box: Box, blob: str, name: str) -> None:
    accepted(box, spec_for(blob, weights={name: {"blob": blob, "tensor": "weight"}}))


def test_an_unknown_builtin_is_refused_with_those_there_are(box: Box, blob: str) -> None:
    spec = spec_for(blob, loss={"kind": "builtin", "name": "info_nse"})
    assert "info_nce" in refused(box, spec, code="invalid-job")


def test_an_option_that_a_builtin_lacks_is_refused(box: Box, blob: str) -> None:
    loss = {"kind": "builtin", "name": "cross_entropy", "options": {"temperature": 1.0}}
    assert "label_smoothing" in refused(box, spec_for(blob, loss=loss), code="invalid-job")


def a_node(op: str, name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args)}


def graph_loss(*nodes: dict[str, Any], tensors: Any = None) -> dict[str, Any]:
    return {
        "kind": "graph",
        "function": {"graph": {"nodes": list(nodes)}, "tensors": tensors or {}},
    }


Z = a_node("placeholder", "z", "z")
SUM = a_node("call_method", "total", "sum", {"node": "z"})
OUTPUT = a_node("output", "output", "output", {"node": "total"})


def test_an_allowed_graph_is_accepted(box: Box, blob: str) -> None:
    accepted(box, spec_for(blob, loss=graph_loss(Z, SUM, OUTPUT), loss_inputs={}))


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ((Z, a_node("call_function", "total", "os.system", "true"), OUTPUT), "os.system"),
        ((Z, OUTPUT), "'total'"),
        ((Z, SUM), "output"),
        ((a_node("placeholder", "z", "z"), a_node("placeholder", "y", "y"), SUM, OUTPUT), "'y'"),
    ],
)
def test_a_graph_that_is_not_allowed_is_refused(box: Box, blob: str, nodes: Any, says: str) -> None:
    spec = spec_for(blob, loss=graph_loss(*nodes), loss_inputs={})
    assert says in refused(box, spec, code="graph-refused")


def test_a_readout_must_be_an_allowed_graph(box: Box, blob: str) -> None:
    graph = graph_loss(Z, SUM, OUTPUT)["function"]
    assert "2 are given" in refused(box, spec_for(blob, readout=graph), code="graph-refused")


def test_too_many_blobs_are_refused(box: Box, blob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradbox_service.admission.tensors.MAX_BLOBS", 1)
    other = upload(box.client, {"x": ones(1)})
    spec = spec_for(blob, inputs=shards(blob, "0/")[:1])
    spec["inputs"][0]["shards"].append({"blob": other})
    assert "at most 1 are allowed" in refused(box, spec, code="invalid-inputs")


def test_many_shards_of_one_blob_are_accepted(box: Box) -> None:
    tensors = {f"{i}/x": np.zeros(1, np.float32) for i in range(400)}
    blob = upload(box.client, tensors | {"labels": np.arange(400)})
    accepted(box, spec_for(blob, inputs=shards(blob, *(f"{i}/" for i in range(400)))))


@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer nonsense", "Basic YTpi", "nonsense"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("PUT", "/v1/blobs/" + "0" * 64),
        ("GET", "/v1/models"),
    ],
)
def test_a_call_without_a_good_token_is_refused(
    box: Box, header: str | None, method: str, path: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    client = httpx.Client(transport=box.transport, base_url="http://box", headers=headers)
    answer = client.request(method, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["type"].endswith("unauthorized")
    assert "token" in answer.json()["detail"]


def test_a_model_is_waited_for_while_workers_start(tmp_path: Any) -> None:
    backing = empty_backing(tmp_path)
    for box in serve(backing, Settings(data=tmp_path)):
        backing.fleet.retire("worker-1")
        for state in (None, "starting"):
            if state:
                announce(backing, state=state)
            answer = box.client.post("/v1/jobs", json=spec_for("0" * 64))
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["category"] == "transient"
            ready = client_with(box.transport, "").get("/readyz")
            assert ready.status_code == 503
