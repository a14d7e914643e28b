"""Files that lie, and names that point elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import zipfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save

from proofs.attacks.attack import attack
from proofs.attacks.target import Target, refused
from tests.service.test_safetensors_header import BAD


def _lying_header(target: Target, data: bytes) -> None:
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    refused(target.eve.put(path, content=data), "blob-rejected")
    assert target.eve.head(path).status_code == 404


for _name, (_data, _why) in BAD.items():
    attack(
        f"file: {_name}",
        tries="a blob whose safetensors header lies, under its true digest",
        must="422 blob-rejected; nothing is stored",
    )(partial(_lying_header, data=_data))


class Runs:
    """What a pickle of this would run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def pickled(self) -> bytes:
        """Return a pickle, by hand, that makes a folder when it is loaded."""
        return b"\x80\x02cos\nmkdir\n" + self._text() + b"\x85R."

    def _text(self) -> bytes:
        data = str(self.proof).encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def as_torch_file(self) -> bytes:
        """Return it as `torch.save` would wrap it."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", self.pickled())
            archive.writestr("archive/version", "3\n")
        return buffer.getvalue()


@attack(
    "file: pickle",
    tries="a pickle and a torch file that run code when they are loaded, as blobs",
    must="422 blob-rejected; the code does not run",
)
def _pickle(target: Target) -> None:
    runs = Runs(target.folder / "ran")
    for data in (runs.pickled(), runs.as_torch_file()):
        _lying_header(target, data)
    assert not runs.proof.exists()


@attack(
    "file: another digest",
    tries="bytes under the digest of others, or under none",
    must="422 blob-rejected; HEAD says 404",
)
def _another_digest(target: Target) -> None:
    data = save({"0": torch.ones(3)})
    path = f"/v1/blobs/{'d' * 64}"
    refused(target.eve.put(path, content=data), "blob-rejected")
    refused(target.eve.put(path, content=b""), "blob-rejected")
    assert target.eve.head(path).status_code == 404


ESCAPES = [
    "../../client.toml",
    "..%2f..%2fclient.toml",
    "%2e%2e/%2e%2e/client.toml",
    "....//....//client.toml",
    "A" * 64,
    "a" * 63,
    "a" * 65,
    "a" * 63 + "%00",
    "a" * 63 + "%0a",
    "a" * 63 + "٣",
    "incoming/" + "a" * 64,
    "",
]


@attack(
    "path: digests that leave the folder",
    tries="HEAD and PUT of digests with dots, slashes, zero bytes, capitals, other digits",
    must="404, 405 or 422 for each; the data folder has no new file",
)
def _digest_traversal(target: Target) -> None:
    before = _files(target.box.data)
    for digest in ESCAPES:
        for method in ("HEAD", "PUT"):
            answer = target.send(
                f"{method} /v1/blobs/{digest} HTTP/1.1\r\nHost: box\r\n"
                f"Authorization: Bearer {target.box.tokens['eve']}\r\n"
                f"Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            status = int(answer.split()[1])
            assert status in (400, 404, 405, 422), (digest, answer[:200])
    assert _files(target.box.data) <= before | {path for path in before if "logs" in path}


def _files(data: Path) -> set[str]:
    return {str(path.relative_to(data)) for path in data.rglob("*") if "redis" not in path.parts}


@attack(
    "path: a spec that names files",
    tries="shards, loss inputs and weights whose blob is a path",
    must="422 invalid-job, which quotes no byte of the file",
)
def _spec_traversal(target: Target) -> None:
    for name in ("../../client.toml", "/etc/passwd", "aa/../../../client.toml", "a" * 63 + "/"):
        tensor = {"blob": name, "tensor": "x"}
        for changes in (
            {"inputs": [{"shards": [{"blob": name}]}]},
            {"loss_inputs": {"x": tensor}},
            {"weights": {"layer.bias": tensor}},
        ):
            detail = refused(target.post(target.eve, **changes), "invalid-job")
            assert "token" not in detail
            assert "root:" not in detail


@attack(
    "path: results and jobs by path",
    tries="job ids with dots, slashes and zero bytes, for each call that takes one",
    must="404 or 405, as for a job that never was",
)
def _job_traversal(target: Target) -> None:
    for job in ("..%2f..%2fclient.toml", "%2e%2e", "*", "%00", "a" * 5000, "gradbox:tokens"):
        for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/result", f"/v1/jobs/{job}/events"):
            answer = target.eve.get(path)
            assert answer.status_code in (404, 405), (path, answer.status_code)
            assert "gbx_" not in answer.text


@attack(
    "bomb: compressed bodies",
    tries="a blob and a job of gzip that unpack to 64 MB, with Content-Encoding: gzip",
    must="nothing is unpacked: 415 or 422, as for any bytes that are no file and no job",
)
def _compressed(target: Target) -> None:
    header = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(bytes(64 * 2**20))
    digest = hashlib.sha256(bomb).hexdigest()
    for answer in (
        target.eve.put(f"/v1/blobs/{digest}", content=bomb, headers=header),
        target.eve.post("/v1/jobs", content=bomb, headers=header),
    ):
        assert answer.status_code in (415, 422), answer.text


@attack(
    "bomb: a header of many names",
    tries="a blob of 15 MB whose header names 150,000 empty tensors",
    must="taken or refused within seconds; /livez answers meanwhile",
    slow=True,
)
def _many_names(target: Target) -> None:
    entries = {
        f"{n:0>40}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(150_000)
    }
    text = json.dumps(entries).encode()
    data = len(text).to_bytes(8, "little") + text
    path = f"/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    answers = []
    slowest = target.slowest_while(
        lambda: answers.append(target.eve.put(path, content=data, timeout=120.0))
    )
    assert answers[0].status_code in (201, 413, 422), answers[0].text
    assert slowest < 5.0, f"/livez took {slowest:.2f} s"


def _index_naming(target: Target, *, named: str, content: bytes | None) -> str:
    """Register a folder whose index names a file, and return what `models verify` says."""
    folder = target.folder / f"model-{len(os.listdir(target.folder))}"
    folder.mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 11,
        "max_position_embeddings": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if content is not None:
        (folder / named).write_bytes(content)
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    models = target.folder / f"{folder.name}.toml"
    models.write_text(f'[models.m]\nbuilder = "hf"\nsource = "./{folder.name}"\n')
    done = target.command("models", "verify", "--models", str(models), within_s=120.0)
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


@attack(
    "path: an index of weights that names a pickle",
    tries="a model's index file that names a .bin, which runs code when torch loads it",
    must="the model is refused with the name; the code does not run",
    slow=True,
)
def _index_names_pickle(target: Target) -> None:
    runs = Runs(target.folder / "ran")
    said = _index_naming(target, named="evil.bin", content=runs.as_torch_file())
    assert not runs.proof.exists(), "its code ran"
    assert "evil.bin" in said, said
    assert ".safetensors" in said, said


@attack(
    "path: an index of weights that leaves its folder",
    tries="a model's index file that names ../secret.safetensors",
    must="the model is refused with the name, although the file is there",
    slow=True,
)
def _index_leaves(target: Target) -> None:
    weights = save({"embeddings.word_embeddings.weight": torch.ones(11, 8)})
    (target.folder / "secret.safetensors").write_bytes(weights)
    said = _index_naming(target, named="../secret.safetensors", content=None)
    assert "../secret.safetensors" in said, said
    assert "folder" in said, said
