"""Bad input that only the model can find, as a program in any language may send it.

What the service finds by itself is refused when it is posted: tests/service/test_bad_input.py.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from tests.boxes import TestBox

SHARDS = {
    "0/0": torch.ones(2, 5).double(),
    "1/0": torch.ones(1, 5).double(),
    "odd/x": torch.ones(2, 5).double(),
    "wide/0": torch.ones(2, 9).double(),
    "labels": torch.arange(3) % 3,
}
FILE = save(SHARDS)
DIGEST = hashlib.sha256(FILE).hexdigest()
NODE = {"op": "call_method", "name": "s", "target": "sum", "args": [{"node": "z"}]}
GOOD: dict[str, Any] = {
    "computation": "gradient",
    "model": "mlp",
    "inputs": [{"shards": [{"blob": DIGEST, "prefix": "0/"}, {"blob": DIGEST, "prefix": "1/"}]}],
    "loss": {"kind": "builtin", "name": "cross_entropy"},
    "loss_inputs": {"labels": {"blob": DIGEST, "tensor": "labels"}},
}


def graph(*nodes: dict[str, Any], output: str = "s") -> dict[str, Any]:
    first = {"op": "placeholder", "name": "z", "target": "z"}
    last = {"op": "output", "name": "out", "target": "output", "args": [{"node": output}]}
    return {"kind": "graph", "function": {"graph": {"nodes": [first, *nodes, last]}}}


def spec(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **changes}


def shards(*prefixes: str, blob: str = DIGEST) -> list[dict[str, Any]]:
    return [{"shards": [{"blob": blob, "prefix": prefix} for prefix in prefixes]}]


def problem_of(answer: httpx.Response) -> tuple[str, str]:
    assert answer.headers["content-type"].startswith("application/problem+json"), answer.text
    found = answer.json()
    assert found["request_id"]
    assert "Traceback" not in answer.text
    return found["type"].removeprefix("urn:gradbox:problem:"), found["detail"]


@pytest.fixture
def http(box: TestBox) -> httpx.Client:
    client = box.http()
    client.timeout = httpx.Timeout(120.0)  # the first job of a process imports what it needs
    assert client.put(f"/v1/blobs/{DIGEST}", content=FILE).status_code in (200, 201)
    return client


FAILING: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong shape": ("model-call-failed", spec(inputs=shards("wide/"))),
    "not scalar": (
        "loss-not-scalar",
        spec(loss=graph({**NODE, "args": [{"node": "z"}, 1]}), loss_inputs={}),
    ),
    "not finite": (
        "loss-not-finite",
        spec(
            loss=graph(
                {"op": "call_method", "name": "q", "target": "square", "args": [{"node": "z"}]},
                {"op": "call_method", "name": "n", "target": "neg", "args": [{"node": "q"}]},
                {"op": "call_method", "name": "l", "target": "log", "args": [{"node": "n"}]},
                {**NODE, "args": [{"node": "l"}]},
            ),
            loss_inputs={},
        ),
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_only_the_model_can_tell_fails_the_job(http: httpx.Client, name: str) -> None:
    code, body = FAILING[name]
    posted = http.post("/v1/jobs", json=body)
    assert posted.status_code == 202, posted.text
    job = f"/v1/jobs/{posted.json()['id']}"
    http.get(f"{job}/events")
    view = http.get(job).json()
    assert view["state"] == "failed"
    assert view["error"]["type"] == f"urn:gradbox:problem:{code}"
    assert problem_of(http.get(f"{job}/result"))[0] == "result-not-ready"
