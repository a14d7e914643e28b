"""A job that ran, run once more: from a client, a command, and as Python, TOML and for curl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradbox import (
    Builtin,
    Cotangents,
    Forward,
    GradClient,
    Gradient,
    InvalidJob,
    Jacobian,
    Job,
    JobNotFound,
    MissingBlobs,
    MixedGradient,
    NeedsBox,
    Penalty,
    PerSampleGradient,
)
from gradbox.cli import main
from gradbox.protocol import CodeForm
from tests.boxes import TestBox, new_token, tensors_in
from tests.case_models import mlp

FORMS: tuple[CodeForm, ...] = ("python", "toml", "curl")
SHARDS = [torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5) * n for n in (1, 2, 3)]


def weighted(z: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (z.sum(1) * weights).square().mean()


def gradient() -> Gradient:
    return Gradient(
        model="mlp",
        inputs=SHARDS,
        loss=weighted,
        loss_inputs={"weights": torch.arange(6.0, dtype=torch.float64)},
        mode="train",
        seed=7,
        name='who\'s "it" é😀\n',
    )


@pytest.fixture
def at_box(real: TestBox, monkeypatch: pytest.MonkeyPatch) -> TestBox:
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    return real


def code_at(box: TestBox, job: Job, form: CodeForm) -> str:
    with box.http(box.token) as http:
        return http.get(f"/v1/jobs/{job.id}/spec", params={"form": form}).raise_for_status().text


def run_code(code: str, form: CodeForm, folder: Path) -> str:
    """Run code of one of the forms, and return the id of the job that it submitted."""
    if form == "toml":
        (folder / "job.toml").write_text(code)
        command = [sys.executable, "-m", "gradbox", "submit", "job.toml"]
    elif form == "curl":
        if shutil.which("curl") is None:
            pytest.skip("no curl on PATH")
        command = ["bash", "-c", code]
    else:
        command = [sys.executable, "-c", f"{code}\nprint(job.id)"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return str(json.loads(run.stdout)["id"]) if form == "curl" else run.stdout.strip()


def tensors_of(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    job.result().save(folder / "result.safetensors")
    return tensors_in(folder / "result.safetensors")


def check_same(first: Job, second: Job, folder: Path) -> None:
    """Check that two jobs gave the same bits."""
    assert first.id != second.id
    expected, found = tensors_of(first, folder), tensors_of(second, folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("form", FORMS)
def test_code_of_a_job_gives_its_bits_again(
    at_box: TestBox, tmp_path: Path, form: CodeForm
) -> None:
    with at_box.client() as client:
        job = client.submit(gradient())
        for code in (code_at(at_box, job, form), job.result().manifest.code(form)):
            check_same(job, client.job(run_code(code, form, tmp_path)), tmp_path)


def test_options_are_changed_where_they_are_given(at_box: TestBox, tmp_path: Path) -> None:
    with at_box.client() as client:
        job = client.submit(gradient())
        job.wait()
        result = client.again(job.id, seed=8, wrt=["2"]).result()
        assert (result.manifest.seed, [*result.grads]) == (8, ["2.weight", "2.bias"])
        for change in ({"sed": 8}, {"precision": "fp8"}):
            with pytest.raises(InvalidJob, match=next(iter(change))):
                client.again(job.id, **change)
        changed = code_at(at_box, job, "toml").replace("seed = 7\n", "seed = 9\n")
        found = client.job(run_code(changed, "toml", tmp_path))
        assert found.result().manifest.seed == 9


ROWS = {"model": "mlp", "inputs": SHARDS}
COMPUTATIONS = {
    "penalty": lambda: Gradient(
        loss=lambda z: z.sum(),
        penalties=[Penalty(at="0", loss=lambda tap: tap.square().mean())],
        **ROWS,
    ),
    "builtin": lambda: Gradient(
        loss=Builtin("cross_entropy"), loss_inputs={"labels": torch.zeros(6).long()}, **ROWS
    ),
    "per sample": lambda: PerSampleGradient(loss=lambda z: z.sum(1), reduce="norm", **ROWS),
    "jacobian": lambda: Jacobian(reduce="vjp", vectors=torch.ones(6, 3).double(), **ROWS),
    "forward": lambda: Forward(readout=lambda output, inputs: output.tanh(), **ROWS),
    "mixed": lambda: MixedGradient(
        inner=lambda v, y: (v * y).square().sum(),
        outer=lambda dfdz: dfdz.square().sum(),
        y={"y": torch.ones(3).double().requires_grad_()},
        **ROWS,
    ),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_every_computation_runs_again(at_box: TestBox, tmp_path: Path, name: str) -> None:
    with at_box.client() as client:
        job = client.submit(COMPUTATIONS[name]())
        job.wait()
        check_same(job, client.again(job.id), tmp_path)
        for form in FORMS:
            assert job.id in code_at(at_box, job, form)


def test_a_gradient_at_cotangents_runs_again(at_box: TestBox, tmp_path: Path) -> None:
    with at_box.client() as client:
        forward = client.submit(Forward(**ROWS))
        forward.wait()
        cotangents = Cotangents(torch.ones(6, 3).double(), of=forward)
        job = client.submit(Gradient(loss=cotangents, wrt="0"))
        code = job.result().manifest.code()
        check_same(job, client.job(run_code(code, "python", tmp_path)), tmp_path)
        assert f'"forward": "{forward.id}"' not in code_at(at_box, job, "python")  # by its digest


def test_the_command_runs_a_job_again(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with at_box.client() as client:
        job = client.submit(gradient())
        job.wait()
        assert main(["submit", "--again", job.id[:14], "--wait"]) == 0
        check_same(job, client.job(capsys.readouterr().out.strip()), tmp_path)
    for wrong in ([], ["job.toml", "--again", job.id], ["--again", job.id, "--estimate"]):
        assert main(["submit", *wrong]) == 2
    assert main(["submit", "--again", "0" * 32]) == 2
    assert "no job" in capsys.readouterr().err


def test_a_blob_that_is_gone_is_named_with_what_to_do(at_box: TestBox) -> None:
    assert at_box.data is not None
    with at_box.client(new_token(at_box.data, "rerunner")) as client:
        job = client.submit(gradient())
        job.wait()
        for blob in client.blobs():
            client.delete_blob(blob.digest)
        with pytest.raises(
            MissingBlobs, match=f"tensors of job {job.id}.*by the program"
        ) as caught:
            client.again(job.id)
        assert caught.value.missing
        with pytest.raises(MissingBlobs):
            client.again(job.id, seed=1)


def test_somebody_elses_job_is_not_there(at_box: TestBox) -> None:
    with at_box.client() as client:
        job = client.submit(gradient())
    with at_box.client(at_box.other_token) as other, pytest.raises(JobNotFound):
        other.again(job.id)


def test_without_a_box_there_is_nothing_to_run_again() -> None:
    client = GradClient.local({"mlp": mlp()})
    job = client.submit(gradient())
    with pytest.raises(NeedsBox):
        client.again(job.id)
