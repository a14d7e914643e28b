"""`gradbox submit`: a job from files gives what the same computation gives from Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradbox import GradClient, Gradient, GradResult, losses
from gradbox.cli import main
from gradbox.cli.job_file import read_job
from gradbox.errors import InvalidJob
from gradbox.protocol import PerSampleGradientSpec
from tests.boxes import TestBox

LOSSES = """\
import torch


def mean_square(z, target, power):
    return ((z - target) ** power).mean()


def per_sample(z):
    return z.square().sum(1)


class Halved(torch.nn.Module):
    def forward(self, z):
        return z.sum() / 2


def inner(y, v):
    return (y * v).square().sum()


def outer(dfdz):
    return dfdz.square().sum()
"""


@pytest.fixture
def at_box(real: TestBox, monkeypatch: pytest.MonkeyPatch) -> TestBox:
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    return real


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two shards, a target and losses."""
    torch.manual_seed(0)
    for index, rows in ((2, 3), (10, 2)):
        save_file({"input": torch.randn(rows, 5).double()}, tmp_path / f"shard{index}.safetensors")
        np.save(tmp_path / f"shard{index}.npy", np.ones((rows, 5)))
    save_file({"t": torch.randn(5, 3).double(), "u": torch.zeros(1)}, tmp_path / "more.safetensors")
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path


def job_file(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def test_groups_have_loss_inputs_of_their_own_and_a_format(folder: Path) -> None:
    for name in ("a", "b"):
        np.save(folder / f"{name}.npy", np.full((5, 3), ord(name), dtype=np.float64))
    text = (
        'computation = "per_sample_gradient"\nmodel = "mlp"\nreduce = "gram"\nagainst = "test"\n'
        'loss = "losses.py:mean_square"\ninputs = {train = "shard2.npy", test = "shard10.npy"}\n'
        "loss_inputs.power = 2\n"
        'loss_inputs.target = {train = "a.npy", test = "b.npy"}\n'
    )
    spec = read_job(Path(job_file(folder, text))).prepare().spec
    assert isinstance(spec, PerSampleGradientSpec)
    assert spec.against_group == "test"
    assert spec.loss_inputs["target"] != spec.against_loss_inputs["target"]
    rounded = 'model = "mlp"\ninputs = "shard2.npy"\nloss = "mse"\ntransfer = "bf16"\n'
    assert read_job(Path(job_file(folder, rounded))).transfer == "bf16"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("file", ["target.npy", "more.safetensors:t"])
def test_a_tensor_of_a_file_can_be_differentiated_by_without_a_warning(
    file: str, folder: Path
) -> None:
    np.save(folder / "target.npy", np.ones((5, 3)))
    text = (
        'model = "mlp"\ninputs = "shard*.safetensors"\nloss = "losses.py:mean_square"\n'
        "[loss_inputs]\npower = 2\n"
        f'target = {{file = "{file}", requires_grad = true}}\n'
    )
    job = read_job(Path(job_file(folder, text)))
    assert isinstance(job, Gradient)
    assert job.loss_inputs["target"].requires_grad


def test_a_job_from_files_equals_the_job_from_python(
    at_box: TestBox, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(
        folder,
        'model = "mlp"\ninputs = "shard*.safetensors"\nloss = "losses.py:mean_square"\n'
        'name = "from a file"\n[loss_inputs]\ntarget = "more.safetensors:t"\npower = 2\n',
    )
    out = folder / "out.safetensors"
    assert main(["submit", path, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    job_id = said.split("\n")[0]
    assert "loss" in said
    from safetensors.torch import load_file

    shards = [load_file(folder / f"shard{index}.safetensors") for index in (2, 10)]
    target = load_file(folder / "more.safetensors")["t"]
    with GradClient() as client:
        assert client.job(job_id).view.name == "from a file"
        expected = client.submit(
            Gradient(model="mlp", inputs=shards, loss=lambda z: ((z - target) ** 2).mean())
        ).result()
    found = GradResult.load(out)
    assert found.loss == expected.loss
    assert all(torch.equal(found.grads[name], expected.grads[name]) for name in expected.grads)


@pytest.mark.parametrize(
    "text",
    [
        'inputs = ["shard2.npy", {0 = "shard10.npy"}]\nloss = "losses.py:Halved"',
        'computation = "forward"\ninputs = "shard2.npy"',
        'computation = "per_sample_gradient"\ninputs = "shard2.npy"\nloss = "losses.py:per_sample"',
        'computation = "jacobian"\ninputs = "shard2.npy"\nwrt = ["*bias"]\nreduce = "norm"',
        'inputs = "shard2.npy"\nloss = {function = "losses.py:Halved"}\n'
        '[[penalties]]\nat = "0"\nloss = "losses.py:Halved"\nweight = 0.5',
    ],
    ids=["arguments", "forward", "per-sample", "jacobian", "penalties"],
)
def test_every_computation_can_be_written_down(
    text: str, at_box: TestBox, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", job_file(folder, f'model = "mlp"\n{text}\n'), "--wait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"


def test_a_gradient_continues_a_forward_job_that_ran_before(
    at_box: TestBox, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = 'computation = "forward"\nmodel = "mlp"\ninputs = "shard2.npy"\n'
    assert main(["submit", job_file(folder, forward), "-o", str(folder / "z.safetensors")]) == 0
    job_id = capsys.readouterr().out.split("\n")[0]
    z = GradResult.load(folder / "z.safetensors").outputs["z"]
    np.save(folder / "dz.npy", np.ones_like(np.asarray(z)))
    text = f'[loss]\ncotangents = "dz.npy"\nof = "{job_id[:16]}"\n'
    assert main(["submit", job_file(folder, text), "-o", str(folder / "g.safetensors")]) == 0
    assert len(GradResult.load(folder / "g.safetensors").grads) == 6


def test_a_builtin_loss_and_groups_need_no_python(folder: Path) -> None:
    text = (
        'model = "m"\nmode = "train"\norder = {b = "more.safetensors:u"}\n'
        '[inputs]\na = "shard2.npy"\nb = ["shard2.npy", "shard10.npy"]\n'
        '[loss]\nbuiltin = "info_nce"\ntemperature = 0.05\n'
    )
    found = read_job(Path(job_file(folder, text)))
    assert isinstance(found, Gradient)
    assert [len(group.shards) for group in found.groups] == [1, 2]
    assert repr(found.loss) == "Builtin('info_nce', temperature=0.05)"
    assert "info_nce" in losses.BUILTIN


def test_the_job_file_in_the_docs_is_a_job(folder: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    text = page.read_text().split("```toml\n")[1].split("```")[0]
    (folder / "shards").mkdir()
    np.save(folder / "shards" / "0.npy", np.ones((2, 64)))
    np.save(folder / "labels.npy", np.arange(2))
    prepared = read_job(Path(job_file(folder, text))).prepare()
    assert prepared.spec.model == "digits"  # type: ignore[union-attr]


def test_a_byte_order_mark_is_no_error(folder: Path) -> None:
    text = '\ufeffmodel = "mlp"\ninputs = "shard2.npy"\nloss = "mse"\n'
    assert read_job(Path(job_file(folder, text))).model == "mlp"


GOOD = 'model = "mlp"\ninputs = "shard2.npy"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = ", "job.toml: expected TOML"),
        (
            'computation = "gradient"\n',
            "missing 1 required keyword-only argument: 'loss'",
        ),
        ('model = "mlp"\nloss = "mmd"\n', "job.toml: inputs: expected .*, got NoneType"),
        (
            f'{GOOD}loss = "info_nce"\nmodell = 1\n',
            "got an unexpected keyword argument 'modell'",
        ),
        (f'{GOOD}computation = "hessian"\n', "computation: expected one of gradient, forward"),
        (f'{GOOD}loss = "losses.py:gone"\n', "loss: expected 'gone' in .*losses.py"),
        (f'{GOOD}loss = "none.py:f"\n', "loss: expected a file, found none at .*none.py"),
        (
            f'{GOOD}[loss]\nbuiltin = "mmd"\nfunction = "losses.py:Halved"\n',
            "loss: expected one of builtin",
        ),
        (f'{GOOD}loss = "mmd"\n[loss_inputs]\nt = "no.npy"\n', "loss_inputs.t: expected a file"),
        (
            f'{GOOD}loss = "mmd"\n[loss_inputs]\nt = "more.safetensors"\n',
            r"loss_inputs.t: expected one tensor, .* holds \['t', 'u'\]",
        ),
        ('model = "m"\nloss = "mmd"\ninputs = "no*.npy"\n', "inputs: expected files, found none"),
        ('model = "m"\nloss = "mmd"\ninputs = [1]\n', r"inputs\[0\]: expected a file"),
        (
            f'{GOOD}loss = "mmd"\n[[penalties]]\nat = "0"\n',
            "missing 1 required keyword-only argument: 'loss'",
        ),
    ],
)
def test_an_error_names_the_file_and_the_key(text: str, says: str, folder: Path) -> None:
    with pytest.raises(InvalidJob, match=f"job.toml: .*{says.removeprefix('job.toml: ')}"):
        read_job(Path(job_file(folder, text)))


def test_what_the_box_refuses_is_wrong_usage_and_names_the_model_that_was_meant(
    at_box: TestBox, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'model = "mpl"\ninputs = "shard2.npy"\nloss = "losses.py:Halved"\n'
    assert main(["submit", job_file(folder, text)]) == 2
    assert "did you mean 'mlp'?" in capsys.readouterr().err
    assert main(["submit", job_file(folder, f"{GOOD}mode = 3\nloss = 'losses.py:Halved'\n")]) == 2
    assert "job.toml: mode: " in capsys.readouterr().err
    assert main(["submit", job_file(folder, text), "-o", "nowhere/out"]) == 2
    assert "got nowhere/out" in capsys.readouterr().err
