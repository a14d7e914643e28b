"""Bad input as a program in any language may send it: a problem that says what to do."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
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
    assert client.put(f"/v1/blobs/{DIGEST}", content=FILE).status_code in (200, 201)
    return client


BAD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unknown model": ("unknown-model", "nope", spec(model="nope")),
    "wrong argument": ("invalid-inputs", "'x'", spec(inputs=shards("odd/"))),
    "different names": ("invalid-inputs", "shard 1", spec(inputs=shards("0/", "odd/"))),
    "no shards": ("invalid-job", "inputs", spec(inputs=[{"shards": []}])),
    "no groups": ("invalid-job", "inputs", spec(inputs=[])),
    "no tensors": ("invalid-inputs", "9/", spec(inputs=shards("9/"))),
    "missing blob": ("missing-blobs", "f" * 8, spec(inputs=shards("0/", blob="f" * 64))),
    "a typo": ("invalid-job", "sead", spec(sead=1)),
    "no loss input": ("invalid-inputs", "labels", spec(loss_inputs={})),
    "not allowed": (
        "graph-refused",
        "os.system",
        spec(
            loss=graph({**NODE, "op": "call_function", "target": "os.system"}),
            loss_inputs={},
        ),
    ),
    "dangling": ("graph-refused", "ghost", spec(loss=graph(output="ghost"), loss_inputs={})),
    "no parameter": ("invalid-inputs", "zzz", spec(wrt=["zzz.*"])),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_job_is_refused_when_it_is_posted(http: httpx.Client, name: str) -> None:
    code, said, body = BAD[name]
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code in (404, 422)
    found, detail = problem_of(answer)
    assert found == code
    assert said in detail


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null"])
def test_what_is_no_job_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/jobs", content=body)
    assert answer.status_code == 422
    assert problem_of(answer)[0] == "invalid-job"


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


def header(length: int, text: bytes) -> bytes:
    return length.to_bytes(8, "little") + text


BYTES: dict[str, Callable[[], bytes]] = {
    "truncated": lambda: FILE[:-3],
    "header only": lambda: FILE[:20],
    "empty": lambda: b"",
    "too long a header": lambda: header(2**40, b"{}"),
    "no JSON": lambda: header(4, b"spam"),
    "pickled": lambda: b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00.",
    "overlap": lambda: header(
        len(
            text := b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            b'"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}'
        ),
        text + b"xyz",
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_safetensors_file_are_refused(http: httpx.Client, name: str) -> None:
    data = BYTES[name]()
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    answer = http.put(path, content=data)
    assert answer.status_code == 422
    assert problem_of(answer)[0] == "blob-rejected"
    assert http.head(path).status_code == 404


def test_bytes_that_do_not_have_their_digest_are_refused(http: httpx.Client) -> None:
    path = f"/v1/blobs/{'e' * 64}"
    answer = http.put(path, content=FILE)
    assert problem_of(answer)[0] == "blob-rejected"
    assert DIGEST in problem_of(answer)[1]
    assert http.head(path).status_code == 404


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/models", "/v1/jobs/x/result"])
@pytest.mark.parametrize("token", [None, "gbx_wrong"])
def test_a_request_without_a_good_token_is_refused(
    box: TestBox, path: str, token: str | None
) -> None:
    client = box.http(token)
    if token is None:
        del client.headers["Authorization"]
    answer = client.get(path)
    assert answer.status_code == 401
    assert problem_of(answer)[0] == "unauthorized"
    assert "gradbox tokens create" in problem_of(answer)[1] or "GRADBOX_TOKEN" in answer.text


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_anothers_job_reads_like_none(box: TestBox, http: httpx.Client, method: str) -> None:
    job_id = http.post("/v1/jobs", json=GOOD).json()["id"]
    theirs = box.http(box.other_token).request(method, f"/v1/jobs/{job_id}")
    assert theirs.status_code == 404
    assert problem_of(theirs)[0] == "job-not-found"


def test_one_key_makes_one_job(http: httpx.Client) -> None:
    key = {"Idempotency-Key": f"key of {id(http)}"}
    first, again = (http.post("/v1/jobs", json=GOOD, headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    other = http.post("/v1/jobs", json=spec(seed=5), headers=key)
    assert other.status_code == 422
    assert problem_of(other)[0] == "idempotency-conflict"


def test_a_slice_of_a_result_can_be_read(http: httpx.Client) -> None:
    job = f"/v1/jobs/{http.post('/v1/jobs', json=GOOD).json()['id']}"
    http.get(f"{job}/events")
    whole = http.get(f"{job}/result")
    part = http.get(f"{job}/result", headers={"Range": "bytes=8-99"})
    assert whole.headers["ETag"] == f'"{hashlib.sha256(whole.content).hexdigest()}"'
    assert part.status_code == 206
    assert part.content == whole.content[8:100]
    assert (
        http.get(f"{job}/result", headers={"If-None-Match": whole.headers["ETag"]}).status_code
        == 304
    )
