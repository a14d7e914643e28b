"""Large per-sample results: made in a small memory, read by ranges, and the same over raw HTTP."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, save

from gradbox import GradResult, InvalidInputs, Jacobian, PerSampleGradient, ProtocolError
from gradbox.results import remote_file
from gradbox_factors import TERMS
from tests.boxes import TestBox
from tests.client import zoo
from tests.engine.per_sample import naive

WAIT_S = 120.0
MIB = 2**20

IN_A_SMALL_MEMORY = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gradbox.protocol import JacobianSpec, Receipt, ShardRef
from gradbox.tensors.safetensors_header import read_header
from gradbox_service.store import BlobStore
from gradbox_worker.work import Work
from gradbox_worker.computations.execution import Execution
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry

class Silent:
    def step(self, phase, done, total): pass

folder, digest, memory = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
registry = Registry(read_models_file(folder / "models.toml"), device=torch.device("cpu"))
model = registry.describe()[0]
def run(name, shards, memory):
    spec = JacobianSpec(
        computation="jacobian", model="wide", wrt=["2.*"],
        inputs=[{"shards": [{"blob": digest, "prefix": prefix} for prefix in shards]}],
    )
    work = Work(
        job_id=name, attempt=1, model="wide", model_version=model.version, spec=spec,
        spec_digest="d", result_path=folder / f"{name}.safetensors", queued_s=0.0,
    )
    return Execution(work=work, registry=registry, blobs=BlobStore(folder / "data"),
        kept=KeptGraphs(), observer=Silent(), result_memory_bytes=memory).execute()
run("warm", ["0/"], memory)  # what torch allocates once
done = run("job", ["0/", "1/"], memory)
header = read_header(folder / "job.safetensors")
receipt = Receipt.model_validate_json(header.metadata["gradbox"])
print(receipt.peak_memory_bytes - receipt.memory_before_bytes, done.result.size_bytes)
"""


def test_a_result_four_times_the_memory_is_made_within_it(tmp_path: Path) -> None:
    source = json.dumps(f"{Path(zoo.__file__)}:wide")
    (tmp_path / "models.toml").write_text(f'[models.wide]\nbuilder = "python"\nsource = {source}\n')
    x = torch.randn(18, 64, generator=torch.Generator().manual_seed(0))
    content = save({"0/0": x[:12].clone(), "1/0": x[12:].clone()})
    digest = hashlib.sha256(content).hexdigest()
    blob = tmp_path / "data" / "blobs" / digest[:2] / digest
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content)
    memory = 32 * MIB
    command = [sys.executable, "-c", IN_A_SMALL_MEMORY, str(tmp_path), digest, str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    peak, size = map(int, done.stdout.split())
    assert size > 4 * memory
    assert peak < memory
    result = GradResult.load(tmp_path / "job.safetensors")
    model = zoo.wide()
    hidden = torch.tanh(model[0](x))
    rows = model[3].weight.detach()[None, :, :, None] * hidden.detach()[:, None, None]
    found = result.grads["2.weight"]
    assert found.shape == (18, 8, 512, 512)
    for sample in range(18):
        torch.testing.assert_close(found[sample], rows[sample])
    bias = model[3].weight.detach().expand(18, -1, -1)
    torch.testing.assert_close(result.grads["2.bias"], bias)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of every answer that this process gets."""
    counts: list[int] = []
    send = httpx.Client.send

    def watched(self: httpx.Client, request: httpx.Request, **given: Any) -> httpx.Response:
        answer = send(self, request, **given)
        counts.append(int(answer.headers.get("content-length", 0)))
        return answer

    monkeypatch.setattr(httpx.Client, "send", watched)
    return counts


def test_many_short_answers_make_the_same_slices(
    twin: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, num_bytes in (("FIRST_BYTES", 20), ("GAP_BYTES", 8), ("REQUEST_BYTES", 1600)):
        monkeypatch.setattr(remote_file, name, num_bytes)
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with twin.client() as client:
        job = client.submit(
            Jacobian(model="mlp", inputs=list(x.split(4)), form="dense", wrt=["2.*"])
        )
        whole = job.result(WAIT_S).grads
        for name, found in job.open().grads.items():
            for index in [(), slice(1, 5), (slice(None), 1), (slice(0, 6, 2), slice(1, 3), -1)]:
                assert torch.equal(found[index], whole[name][index]), (name, index)


def test_slices_of_a_result_come_alone(box: TestBox, received: list[int]) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    with box.client() as client:
        job = client.submit(Jacobian(model="wide", inputs=list(x.split(4)), wrt=["2.*"]))
        job.wait(WAIT_S)
        received.clear()
        result = job.open()
        assert sum(received) < 100_000
        weight = result.grads["2.weight"]
        assert weight.shape == (6, 8, 512, 512)
        assert weight.dtype == torch.float32
        row_bytes = 512 * 512 * 4
        whole = job.result(WAIT_S).grads["2.weight"]
        for index, wanted_bytes in [
            (slice(3, 5), 16 * row_bytes),
            ((4, 3), row_bytes),
            ((4, 3, slice(10, 12)), 2 * 512 * 4),
            ((slice(0, 2), -1), 2 * row_bytes),
            ((5, slice(1, 7, 3)), 4 * row_bytes),
            ((slice(2, 2),), 0),
        ]:
            received.clear()
            part = weight[index]
            assert sum(received) <= wanted_bytes + 2048, index
            assert torch.equal(part, whole[index]), index
        with pytest.raises(IndexError):
            weight[6]


def test_copies_of_a_result_that_stays_on_its_box_read_on(twin: TestBox) -> None:
    with twin.client() as client:
        job = client.submit(Jacobian(model="wide", inputs=[torch.ones(2, 64)], wrt=["2.bias"]))
        job.wait(WAIT_S)
        opened, fetched = job.open(), job.result(WAIT_S)
        for copied in (copy.copy(opened), copy.deepcopy(opened)):
            assert torch.equal(copied.grads["2.bias"][1], fetched.grads["2.bias"][1])
        with pytest.raises(InvalidInputs, match=r"result\.save"):
            ForkingPickler.dumps(opened)


def test_one_parameter_of_a_factored_result_comes_alone(
    box: TestBox, received: list[int], tmp_path: Path
) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    computation = PerSampleGradient(
        model="wide", inputs=[x], loss=lambda z: z.square().sum(1), form="factored"
    )
    with box.client() as client:
        job = client.submit(computation)
        whole = job.result(WAIT_S)
        received.clear()
        result = job.open()
        row = result.grads["3.bias"][2]
        assert torch.equal(row, whole.grads["3.bias"][2])
        view = job.refresh().result
        assert view is not None
        assert sum(received) < view.size_bytes + 64 * 1024
        result.save(tmp_path / "kept.safetensors")
    kept = GradResult.load(tmp_path / "kept.safetensors")
    assert torch.equal(kept.gram(), whole.gram())
    # Behaves as the tensor it stands for.
    weight = kept.grads["2.weight"]
    assert torch.equal(weight * 2, 2 * whole.grads["2.weight"][:])
    assert torch.allclose(weight.flatten(1).norm(dim=1), kept.parameter_norms()["2.weight"].float())
    assert torch.equal(torch.stack(list(weight)), weight[:])
    assert kept.numpy()["2.weight"].shape == (6, 512, 512)


def test_saving_a_result_that_stays_on_its_box_goes_on_where_it_broke(
    twin: TestBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was left in a file of another name each time would fill the disk, and never be read."""
    path = tmp_path / "kept.safetensors"
    with twin.client() as client:
        x = torch.ones(2, 64)
        job = client.submit(Jacobian(model="wide", inputs=[x], wrt=["2.*"], form="dense"))
        result = job.open(WAIT_S)

        def stopped(have: int, total: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(result._file, "_downloading", lambda: nullcontext(stopped))
        with pytest.raises(KeyboardInterrupt):
            result.save(path)
        (part,) = tmp_path.iterdir()
        assert 0 < part.stat().st_size < job.view.result.size_bytes
        seen: list[int] = []
        monkeypatch.setattr(
            result._file, "_downloading", lambda: nullcontext(lambda have, total: seen.append(have))
        )
        left_bytes = part.stat().st_size
        result.save(path)
    assert seen[0] > left_bytes
    assert list(tmp_path.iterdir()) == [path]
    assert GradResult.load(path).grads["2.weight"].shape == (2, 8, 512, 512)


def test_a_result_that_changed_is_not_read_on(twin: TestBox) -> None:
    with twin.client() as client:
        job = client.submit(Jacobian(model="wide", inputs=[torch.ones(1, 64)], reduce="norm"))
        job.wait(WAIT_S)
        view = job.refresh()
        assert view.result is not None
        forged = view.result.model_copy(update={"sha256": "0" * 64})
        job._view = view.model_copy(update={"result": forged})
        with pytest.raises(ProtocolError, match="another"):
            job.open()


def test_a_factored_jacobian_over_raw_http_reads_as_the_wire_states(box: TestBox) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    content = save({"0/0": x})
    digest = hashlib.sha256(content).hexdigest()
    job = {
        "computation": "jacobian",
        "model": "mlp",
        "inputs": [{"shards": [{"blob": digest, "prefix": "0/"}]}],
        "form": "factored",
    }
    with box.http() as http:
        assert http.put(f"/v1/blobs/{digest}", content=content).is_success
        posted = http.post("/v1/jobs", json=job)
        assert posted.status_code == 202, posted.text
        path = f"/v1/jobs/{posted.json()['id']}"
        with http.stream("GET", f"{path}/events", timeout=WAIT_S) as events:
            for _ in events.iter_lines():
                pass
        file = http.get(f"{path}/result").content
    length = int.from_bytes(file[:8], "little")
    metadata = json.loads(file[8 : 8 + length])["__metadata__"]
    tensors = load(file)
    (piece,) = json.loads(metadata["gradbox_factors"])["pieces"]
    terms = {term["parameter"]: term for term in piece}
    term = terms["0.weight"]
    left, right = (tensors[term["tensors"][name]] for name in ("left", "right"))
    assert term["rule"] == "outer"
    assert not term["geometry"]["transposed"]
    J = torch.einsum("ybto,bti->byoi", left, right)
    model = zoo_mlp()
    expected = naive.jacobian(model, {"0": x})
    assert naive.difference(J, expected["0.weight"]) <= naive.TOLERANCE
    assert terms["0.bias"]["tensors"]["left"] == term["tensors"]["left"]
    assert {term["rule"] for term in piece} <= TERMS.keys()


def zoo_mlp() -> torch.nn.Module:
    from tests import case_models

    return case_models.mlp()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reduce": "mean"}, "reduce"),
        ({"reduce": "projection", "dim": 0}, "dim: expected a whole number"),
        ({"penalties": []}, "penalties: expected none in a jacobian"),
        ({"retain": 0}, "retain: expected none in a jacobian"),
        ({"returns": ["grads"]}, "returns: expected none in a jacobian"),
        ({"clip": 1.0}, "clip"),
    ],
)
def test_raw_jobs_that_mean_nothing_are_refused(
    twin: TestBox, changes: dict[str, Any], says: str
) -> None:
    job = {"computation": "jacobian", "model": "mlp", "inputs": [{"shards": [{"blob": "0" * 64}]}]}
    with twin.http() as http:
        answer = http.post("/v1/jobs", json=job | changes)
    assert answer.status_code == 422
    assert says in answer.json()["detail"]
