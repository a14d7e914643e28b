"""A disk that returns other bytes than were written to it: nobody gets wrong numbers in silence."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from gradbox import (
    Cotangents,
    Forward,
    GradClient,
    Gradient,
    GradResult,
    InvalidInputs,
    MissingBlobs,
    ProtocolError,
)
from gradbox.cli import main
from tests import case_models
from tests.boxes import TestBox

WAIT_S = 120.0
# Too large to be in Redis.
LARGE_X = torch.linspace(-1, 1, 15_000).double().view(-1, 5)
GONE = "urn:gradbox:problem:result-gone"


def sum_of_squares(z: Tensor) -> Tensor:
    return z.square().sum()


def flip(path: Path, at: int, *, unnoticed: bool = False) -> None:
    """Flip a bit of a file; unnoticed, the file does not look as if it was written to."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    if unnoticed:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def blob_at(box: TestBox, digest: str) -> Path:
    assert box.data is not None
    return box.data / "blobs" / digest[:2] / digest


def gradient_of(x: Tensor) -> tuple[Gradient, Tensor]:
    """Return a job, and the gradient of the first weight by naive code."""
    model = case_models.mlp()
    sum_of_squares(model.eval()(x)).backward()
    expected = model.get_parameter("0.weight").grad
    assert expected is not None
    return Gradient(model="mlp", inputs=[x], loss=sum_of_squares), expected


def test_a_damaged_blob_is_sent_again_by_the_client(real: TestBox, uploads: list[str]) -> None:
    gradient, expected = gradient_of(LARGE_X)
    with real.client() as client:
        client.run(gradient)
        (digest,) = uploads
        blob = blob_at(real, digest)
        whole = blob.read_bytes()
        flip(blob, -3)
        torch.testing.assert_close(client.run(gradient).grads["0.weight"], expected)
    assert blob.read_bytes() == whole
    assert uploads == [digest] * 2


@pytest.mark.parametrize("how", ["a flipped bit", "cut short"])
def test_the_right_bytes_take_the_place_of_a_damaged_blob(real: TestBox, how: str) -> None:
    content = save({"x": torch.arange(3.0) + len(how)})
    path = f"/v1/blobs/{hashlib.sha256(content).hexdigest()}"
    with real.http() as http:
        assert http.put(path, content=content).status_code == 201
        blob = blob_at(real, path.rpartition("/")[2])
        flip(blob, -1) if how == "a flipped bit" else os.truncate(blob, 70)
        assert http.head(path).status_code == 404
        assert http.put(path, content=content).status_code == 201
        assert blob.read_bytes() == content
        assert http.head(path).status_code == 200


def test_a_job_that_reads_a_damaged_blob_fails_and_its_owner_can_mend_it(
    real: TestBox, uploads: list[str]
) -> None:
    gradient, expected = gradient_of(-2 * LARGE_X)
    with real.client() as client, real.http() as http:
        http.put("/v1/operation", json={"mode": "paused"}).raise_for_status()
        try:
            job = client.submit(gradient)
            digest = uploads[-1]
            flip(blob_at(real, digest), -3, unnoticed=True)
        finally:
            http.put("/v1/operation", json={"mode": "running"}).raise_for_status()
        with pytest.raises(MissingBlobs, match=f"{digest}.*submit the job again, which uploads it"):
            job.result(WAIT_S)
        torch.testing.assert_close(client.run(gradient).grads["0.weight"], expected)


@pytest.fixture
def large(real: TestBox) -> tuple[str, Path]:
    """A job of a few blocks, done, by its id, and where its result lies."""
    assert real.data is not None
    rows = torch.linspace(-1, 1, 40_000 * 5).double().view(-1, 5)
    with real.client() as client:
        job = client.submit(Forward(model="mlp", inputs=[rows]))
        job.wait(WAIT_S)
    (path,) = (real.data / "results").glob(f"{job.id}.*.safetensors")
    return job.id, path


def test_a_damaged_result_is_not_opened_where_it_lies(
    real: TestBox, large: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, path = large
    flip(path, path.stat().st_size // 2, unnoticed=True)
    monkeypatch.setenv("GRADBOX_DATA", str(real.data))
    monkeypatch.delenv("GRADBOX_URL", raising=False)
    monkeypatch.delenv("GRADBOX_TOKEN", raising=False)
    with GradClient() as client, pytest.raises(ProtocolError, match="submit the job again"):
        client.job(job_id).result()


def test_parts_of_a_damaged_result_are_compared(real: TestBox, large: tuple[str, Path]) -> None:
    job_id, path = large
    rows = GradResult.load(path).outputs["z"].clone()
    flip(path, path.stat().st_size // 2, unnoticed=True)
    with real.client() as client:
        outputs = client.job(job_id).open().outputs["z"]
        for part in (slice(0, 5), slice(6_000, 12_000), slice(39_990, 40_000)):
            assert torch.equal(outputs[part], rows[part])
        with pytest.raises(ProtocolError, match="the box's disk has damaged them; submit the job"):
            outputs[:]
        with pytest.raises(ProtocolError, match="the box's disk has damaged them; submit the job"):
            outputs[19_990:20_010]


def test_a_damaged_receipt_is_not_read(real: TestBox, large: tuple[str, Path]) -> None:
    job_id, path = large
    flip(path, path.read_bytes().index(b"seconds"), unnoticed=True)
    with real.client() as client, pytest.raises(ProtocolError, match="the box's disk has damaged"):
        client.job(job_id).open()
    with real.http() as http:
        answer = http.get(f"/v1/jobs/{job_id}/receipt")
    assert (answer.status_code, answer.json()["type"]) == (410, GONE)


def test_a_job_does_not_go_on_from_a_damaged_result(real: TestBox, large: tuple[str, Path]) -> None:
    job_id, path = large
    z = GradResult.load(path).outputs["z"]
    flip(path, path.stat().st_size // 2, unnoticed=True)
    gradient = Gradient(loss=Cotangents(torch.ones_like(z), of=job_id))
    said = "damaged on its disk; run the forward job again"
    with real.client() as client, pytest.raises(InvalidInputs, match=said):
        client.run(gradient)


def test_a_result_of_before_the_checksums_is_still_read(large: tuple[str, Path]) -> None:
    _, path = large
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    del tensors["checksums"]
    before = path.with_name("before")
    save_file(tensors, before, metadata=metadata)
    assert torch.equal(GradResult.load(before).outputs["z"], tensors["outputs/z"])
    before.unlink()


def test_verify_lists_what_is_damaged(
    real: TestBox, large: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job_id, path = large
    content = save({"x": torch.arange(7.0)})
    digest = hashlib.sha256(content).hexdigest()
    with real.http() as http:
        http.put(f"/v1/blobs/{digest}", content=content).raise_for_status()
    blob = blob_at(real, digest)
    flip(blob, -1, unnoticed=True)
    flip(path, path.stat().st_size // 2, unnoticed=True)
    before = blob.stat().st_atime_ns
    assert main(["storage", "verify", "--data", str(real.data), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    damaged = {(file["kind"], file["name"]) for file in report["damaged"]}
    assert damaged >= {("blob", digest), ("result", job_id)}
    assert len(damaged) < report["compared"]
    assert blob.stat().st_atime_ns == before  # to be looked at is no use
    assert main(["storage", "verify", "--data", str(real.data)]) == 1
    assert digest in capsys.readouterr().out
