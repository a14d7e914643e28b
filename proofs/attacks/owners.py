"""What is another's: jobs, results, events, blobs, keys, tokens."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any

import httpx
import torch

from proofs.attacks.attack import attack
from proofs.attacks.target import SUM, Target, graph_loss, refused
from tests.boxes import ROOT

NOBODYS = "0" * 32
FILES_WITH_TOKEN = ("client.toml", "owner-token")


def _done(target: Target, **changes: Any) -> str:
    """Return the id of a job of ann's that is done."""
    job = target.job(target.ann, **changes)
    assert target.ended(target.ann, job)["state"] == "done"
    return job


@attack(
    "another's job: read, listened to, cancelled",
    tries="every call on a job with the token of somebody else",
    must="404 with the very words that a job gets which never was; the job goes on",
)
def _anothers_job(target: Target) -> None:
    job = _done(target)
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/events"),
        ("GET", "/result"),
        ("HEAD", "/result"),
    ):
        theirs = target.eve.request(method, f"/v1/jobs/{job}{path}")
        nobodys = target.eve.request(method, f"/v1/jobs/{NOBODYS}{path}")
        assert theirs.status_code == nobodys.status_code == 404
        if method != "HEAD":
            assert refused(theirs, "job-not-found", status=404).replace(job, NOBODYS) == refused(
                nobodys, "job-not-found", status=404
            )
    ranged = target.eve.get(f"/v1/jobs/{job}/result", headers={"Range": "bytes=0-9"})
    assert ranged.status_code == 404
    assert target.ann.get(f"/v1/jobs/{job}").json()["state"] == "done"


@attack(
    "another's job: seen in a list",
    tries="GET /v1/jobs with every filter",
    must="not one job of others",
)
def _anothers_list(target: Target) -> None:
    job = _done(target)
    for query in ({}, {"state": "done"}, {"limit": 500}, {"owner": "ann"}, {"all": "true"}):
        answer = target.eve.get("/v1/jobs", params=query)
        if answer.is_success:
            assert all(found["owner"] == "eve" for found in answer.json()["jobs"])
            assert job not in answer.text


@attack(
    "another's forward job: cotangents for it",
    tries="a gradient at cotangents of the outputs of somebody else's forward job",
    must="refused as if that job were not there",
)
def _anothers_forward(target: Target) -> None:
    spec = target.spec(target.ann, computation="forward")
    del spec["loss"]
    job = str(target.ann.post("/v1/jobs", json=spec).json()["id"])
    assert target.ended(target.ann, job)["state"] == "done"
    blob = target.upload(target.eve, {"z": torch.ones(2, 2)})
    tensors = {"z": {"blob": blob, "tensor": "z"}}
    details = []
    for forward in (job, NOBODYS):
        loss = {"kind": "cotangents", "forward": forward, "tensors": tensors}
        answer = target.eve.post("/v1/jobs", json={"computation": "gradient", "loss": loss})
        assert 400 <= answer.status_code < 500, answer.text
        details.append(answer.json()["detail"].replace(job, NOBODYS))
    assert details[0] == details[1]


@attack(
    "another's key",
    tries="the idempotency key of somebody else's job, with the same body and with another",
    must="a job of one's own, as if the key were fresh",
)
def _anothers_key(target: Target) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    spec = target.spec(target.ann)
    first = target.ann.post("/v1/jobs", json=spec, headers=key).json()["id"]
    target.spec(target.eve)  # her own copy of the blob
    second = target.eve.post("/v1/jobs", json=spec, headers=key)
    assert second.status_code == 202, second.text
    assert second.json()["id"] != first
    assert second.json()["owner"] == "eve"


@attack(
    "a key twice",
    tries="one key with two bodies, and keys with line ends, commas, 10,000 characters",
    must="422 idempotency-conflict for the second body; the odd keys do no harm",
)
def _key_twice(target: Target) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    spec = target.spec(target.eve)
    assert target.eve.post("/v1/jobs", json=spec, headers=key).status_code == 202
    other = target.eve.post("/v1/jobs", json={**spec, "seed": 9}, headers=key)
    refused(other, "idempotency-conflict")
    for odd in ("", "k" * 10_000, "a,b;c=\\'\"", "*"):
        answer = target.eve.post("/v1/jobs", json=spec, headers={"Idempotency-Key": odd})
        assert answer.status_code in (202, 422), answer.text


@attack(
    "another's blob: is it there?",
    tries="HEAD of a blob that only somebody else has sent",
    must="404, as for a blob that is not there",
)
def _anothers_blob(target: Target) -> None:
    blob = target.upload(target.ann, {"0": torch.rand(4, 3)})
    assert target.eve.head(f"/v1/blobs/{blob}").status_code == 404


@attack(
    "another's blob: used",
    tries="a job over a blob that only somebody else has sent",
    must="422 missing-blobs",
)
def _anothers_blob_used(target: Target) -> None:
    blob = target.upload(target.ann, {"0": torch.rand(4, 3)})
    answer = target.post(target.eve, inputs=[{"shards": [{"blob": blob}]}])
    refused(answer, "missing-blobs")


@attack(
    "another's blob: claimed without its bytes",
    tries="PUT of the digest of somebody else's blob with other bytes, or none",
    must="422 blob-rejected, and it is still not eve's",
)
def _anothers_blob_claimed(target: Target) -> None:
    blob = target.upload(target.ann, {"0": torch.rand(4, 3)})
    for data in (b"", b"x" * 100):
        refused(target.eve.put(f"/v1/blobs/{blob}", content=data), "blob-rejected")
    refused(target.post(target.eve, inputs=[{"shards": [{"blob": blob}]}]), "missing-blobs")


TOKENS = [
    None,
    "",
    "Bearer",
    "Bearer gbx_" + "A" * 43,
    "Bearer " + "0" * 64,
    "Bearer " + "x" * 8000,
    "Bearer *",
    "Bearer ' OR 1=1 --",
    "Basic YW5uOg==",
    "Bearer ann",
    "Bearer null",
    "bearer\tann",
]


@attack(
    "tokens: guessed",
    tries="no token, odd schemes, wildcards, names and hashes in its place",
    must="401 for each, with WWW-Authenticate and no word on which tokens there are",
)
def _guessed(target: Target) -> None:
    for given in TOKENS:
        headers = {} if given is None else {"Authorization": given}
        answer = httpx.get(f"{target.url}/v1/jobs", headers=headers, trust_env=False)
        assert answer.status_code == 401, (given, answer.text)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "ann" not in answer.json()["detail"]


@attack(
    "tokens: in the address",
    tries="a good token as a query parameter, a cookie and another header",
    must="401: addresses end up in logs",
)
def _in_the_address(target: Target) -> None:
    token = target.box.tokens["ann"]
    for parameters, headers in (
        ({"token": token, "access_token": token}, {}),
        ({}, {"Cookie": f"token={token}"}),
        ({}, {"X-API-Key": token}),
    ):
        answer = httpx.get(
            f"{target.url}/v1/jobs", params=parameters, headers=headers, trust_env=False
        )
        assert answer.status_code == 401


@attack(
    "tokens: revoked",
    tries="a token on a connection that was open when the box's owner revoked it",
    must="401 at the next request",
)
def _revoked(target: Target) -> None:
    name = f"mallory-{uuid.uuid4().hex[:6]}"
    target.box.make_tokens([name])
    with target.box.http(name) as mallory:
        target.box.tokens.pop(name)
        assert mallory.get("/v1/jobs").status_code == 200
        command = [sys.executable, "-m", "gradbox", "tokens", "revoke", name]
        subprocess.run(
            [*command, "--data", str(target.box.data)], check=True, cwd=ROOT, capture_output=True
        )
        assert mallory.get("/v1/jobs").status_code == 401
        assert mallory.post("/v1/jobs", json={}).status_code == 401


@attack(
    "tokens: read from the disk",
    tries="searching the data folder, logs and Redis included, for the tokens",
    must="only owner-token and client.toml hold its owner's, mode 0600; all others are hashes",
)
def _on_disk(target: Target) -> None:
    target.job(target.eve)
    tokens = [token.encode() for token in target.box.tokens.values()]
    for path in target.box.data.rglob("*"):
        if path.is_file() and path.name not in FILES_WITH_TOKEN:
            data = path.read_bytes()
            assert not any(token in data for token in tokens), path
    for name in FILES_WITH_TOKEN:
        assert (target.box.data / name).stat().st_mode & 0o077 == 0


@attack(
    "the owner: sees and cancels everybody's jobs",
    tries="the token that `gradbox up` wrote, on jobs of users",
    must="GET and DELETE answer as for one's own",
)
def _owner_sees(target: Target) -> None:
    job = target.job(target.ann, loss=graph_loss(SUM))
    with target.admin() as admin:
        assert admin.get(f"/v1/jobs/{job}").status_code == 200
        assert admin.delete(f"/v1/jobs/{job}").status_code == 202
