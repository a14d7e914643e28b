"""Runs as a client has them: what is posted, what comes back, and each step once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gradbox import (
    Cotangents,
    GradClient,
    Gradient,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobFailed,
    LoRA,
    LossNotFinite,
    Optimizer,
    Penalty,
    RunConflict,
    RunNotFound,
    TrainRun,
    step_seed,
)
from gradbox.cli import main
from gradbox.progress import StepsLine
from tests.client.run_box import VERSION, RunBox

SHARDS = [torch.ones(2, 3), torch.zeros(2, 3)]
SGD = Optimizer("sgd", lr=0.1)


@pytest.fixture
def box() -> RunBox:
    return RunBox()


@pytest.fixture
def client(box: RunBox) -> Iterator[GradClient]:
    with box.client() as client:
        yield client


@pytest.fixture
def run(client: GradClient) -> TrainRun:
    return client.train("m", optimizer=SGD, wrt="a.*", seed=7, name="towers")


def product(z: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return z.sum() * (left * right).sum()


def squares(z: torch.Tensor) -> torch.Tensor:
    return z.square().sum()


def step(run: TrainRun, scale: float = 1.0, **given: Any) -> Any:
    return run.step(inputs=[scale * shard for shard in SHARDS], loss=squares, **given)


def test_a_step_says_what_the_box_says_of_it(run: TrainRun) -> None:
    found = step(run)
    assert (found.number, found.loss, found.grad_norm, found.lr) == (1, 1.0, 1.0, [0.5])
    assert found.manifest.run == run.id
    assert not found.grads
    assert (run.num_steps, run.view.loss) == (1, 1.0)
    assert (step(run).number, run.num_steps) == (2, 2)


def test_a_step_is_one_request(box: RunBox, run: TrainRun) -> None:
    del box.requests[:]
    step(run)
    assert box.requests == [f"POST /v1/runs/{run.id}/steps/1"]


def test_a_step_is_the_gradient_of_the_same_arguments_with_the_runs(
    box: RunBox, run: TrainRun
) -> None:
    given: dict[str, Any] = {
        "inputs": {"a": SHARDS, "b": SHARDS},
        "loss": lambda a, b, scale: (a * b).sum() * scale,
        "loss_inputs": {"scale": torch.ones((), requires_grad=True)},
        "penalties": [Penalty(at="1", loss=squares)],
        "readout": lambda output, inputs: output[:, 0],
        "method": {"a": "forward", "b": "other"},
        "order": {"a": np.arange(4)[::-1].copy()},
        "output": "hidden",
        "streams": "sample",
        "retain": 0,
        "returns": ("grads",),
        "transfer": "bf16",
        "name": "one step",
    }
    run.step(**given, lr=0.5, clip_norm=1.0, clip_value=2.0)
    posted = box.specs[-1]
    of_run = {
        "model": f"m@{VERSION}",
        "wrt": "a.*",
        "mode": "train",
        "seed": step_seed(7, 1),
    }
    gradient = Gradient(**given, **of_run).prepare().spec.model_dump(mode="json")
    update = {"run": run.id, "number": 1, "lr": 0.5, "clip_norm": 1.0, "clip_value": 2.0}
    assert posted == gradient | {"computation": "step"} | update


@pytest.mark.parametrize("name", ["model", "wrt", "mode", "precision", "seed", "weights"])
def test_what_is_the_runs_cannot_be_given_to_a_step(run: TrainRun, name: str) -> None:
    with pytest.raises(InvalidJob, match=f"{name}: expected none in a step"):
        step(run, **{name: None})
    assert run.num_steps == 0


def test_a_step_whose_answer_is_lost_is_made_once(box: RunBox, run: TrainRun) -> None:
    box.lost = 2
    found = step(run)
    assert box.requests[-3:] == [f"POST /v1/runs/{run.id}/steps/1"] * 3
    assert (found.number, run.num_steps, len(box.history[run.id])) == (1, 1, 1)


def test_a_step_that_is_repeated_after_a_restart_is_the_step_that_was_made(
    box: RunBox, run: TrainRun
) -> None:
    # The tensors are so large that a client which has sent others under these names pools them.
    def batch(number: int) -> dict[str, Any]:
        torch.manual_seed(number)
        inputs = {"left": torch.randn(200, 100), "right": torch.randn(200, 100)}
        return {"loss_inputs": inputs, "loss": product}

    run.step(SHARDS, **batch(1))
    stale = run.view
    made = run.step(SHARDS, **batch(2))
    with box.client() as another:
        again = TrainRun(another.find_run(run.id)._client, stale)  # which has not seen step 2
        repeated = again.step(SHARDS, **batch(2))
    assert repeated.manifest == made.manifest
    assert len(box.history[run.id]) == 2


def test_a_script_that_is_started_again_goes_on(box: RunBox, run: TrainRun) -> None:
    step(run)
    with box.client() as client:
        assert step(client.find_run(run.id), 2.0).number == 2
        assert step(client.find_run("towers"), 3.0).number == 3


def test_of_two_clients_one_wins_and_the_other_hears_where_the_run_is(
    box: RunBox, run: TrainRun
) -> None:
    with box.client() as client:
        other = client.find_run("towers")
        step(run)
        with pytest.raises(RunConflict, match="the run is at step 1") as caught:
            step(other, 2.0)
        assert (caught.value.num_steps, other.num_steps) == (1, 0)
        other.refresh()
        assert step(other, 2.0).number == 2


def test_a_step_that_fails_leaves_its_number(box: RunBox, run: TrainRun) -> None:
    step(run)
    box.failing = LossNotFinite("expected a finite loss, got nan")
    with pytest.raises(JobFailed, match="nan"):
        step(run, 2.0)
    assert run.num_steps == 1
    assert step(run, 3.0).number == 2


def test_the_newest_run_of_a_name_is_found(client: GradClient, run: TrainRun) -> None:
    newer = client.train("m", optimizer=SGD, name="towers")
    assert client.find_run("towers").id == newer.id
    assert [found.id for found in client.runs()] == [newer.id, run.id]
    with pytest.raises(RunNotFound, match="no run of yours"):
        client.find_run("another one")


def test_any_computation_takes_a_runs_weights(run: TrainRun) -> None:
    states = {
        run: {"run": run.id},
        run.at(3): {"run": run.id, "step": 3},
        run.saved("good"): {"run": run.id, "save": "good"},
        "good": {"save": "good"},
    }
    for weights, state in states.items():
        for job in (
            Gradient(model="m", inputs=SHARDS, loss=squares, weights=weights),
            Jacobian(model="m", inputs=SHARDS, weights=weights),
        ):
            spec: Any = job.prepare().spec
            assert spec.state.model_dump(exclude_none=True) == state
            assert not spec.weights
    with pytest.raises(InvalidInputs, match="or a run"):
        Gradient(model="m", inputs=SHARDS, loss=squares, weights=3).prepare()  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="weights: save"):
        Gradient(model="m", inputs=SHARDS, loss=squares, weights="a/b").prepare()


def test_a_run_begins_from_a_state_with_or_without_its_optimizer(
    box: RunBox, client: GradClient, run: TrainRun
) -> None:
    client.train("m", optimizer=SGD, start="good")
    assert box.specs[-1]["start"]["save"] == "good"
    assert box.specs[-1]["start_moments"] is True
    client.train("m", optimizer=SGD, start_weights=run.at(3))
    assert box.specs[-1]["start"] == {"run": run.id, "step": 3, "save": None}
    assert box.specs[-1]["start_moments"] is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adamw"}, "such as Optimizer"),
        ({"adapter": "lora"}, "LoRA"),
        ({"adapter": LoRA(8, 16, "*.query"), "wrt": "a.*"}, "beside adapter"),
        ({"start": "a", "start_weights": "b"}, "got both"),
        ({"start": 3}, "a saved one"),
        ({"mode": "training"}, "mode"),
    ],
)
def test_what_no_run_can_have_is_refused_here(
    client: GradClient, box: RunBox, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidJob, match=said):
        client.train(**{"model": "m", "optimizer": SGD, **given})
    assert not box.requests


def test_an_optimizer_is_its_name_with_its_options() -> None:
    groups = [{"wrt": "*.bias", "weight_decay": np.float32(0)}, {"wrt": ["a", "b"], "lr": 1}]
    spec = Optimizer("adamw", lr=torch.tensor(0.5), betas=(0.9, 0.95), groups=groups).spec
    assert spec.options == {"lr": 0.5, "betas": [0.9, 0.95]}
    assert [(g.wrt, g.options) for g in spec.groups] == [
        (["*.bias"], {"weight_decay": 0}),
        (["a", "b"], {"lr": 1}),
    ]
    for wrong in (
        lambda: Optimizer("adamv", lr=1),
        lambda: Optimizer("adam", momentum=0.9),
        lambda: Optimizer("adam", lr=-1),
        lambda: Optimizer("adam", groups=[{"params": "*.bias"}]),
    ):
        with pytest.raises(InvalidJob, match="optimizer"):
            wrong()


def test_targets_of_an_adapter_may_stand_in_one_string() -> None:
    assert [*LoRA(8, 16, "*.query|*.value").spec.targets] == ["*.query", "*.value"]
    assert LoRA(8, 16, ["*.query"], 0.1).spec.dropout == 0.1
    with pytest.raises(InvalidJob, match="LoRA: rank"):
        LoRA(0, 16, "*.query")


def test_weights_come_by_their_own_names_and_stay(box: RunBox, run: TrainRun) -> None:
    weights = run.weights()
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {"w": [1, 1], "b": [1]}
    run.at(3).weights()
    run.saved("good").weights()
    paths = [path.partition("weights")[2] for path in box.requests[-3:]]
    assert paths == ["", "?step=3", "?save=good"]


def test_a_state_that_somebody_else_saved_is_named_without_its_run(
    box: RunBox, client: GradClient
) -> None:
    state = client.saved("theirs")
    assert state.weights()["w"].tolist() == [1, 1]
    assert box.requests == ["GET /v1/saves/theirs/weights"]
    client.train("m", optimizer=SGD, start=state)
    assert box.specs[-1]["start"]["save"] == "theirs"
    client.saved("theirs", run="0" * 32).weights()
    assert box.requests[-1] == f"GET /v1/runs/{'0' * 32}/weights?save=theirs"
    with pytest.raises(InvalidJob, match=r"client\.saved: save"):
        client.saved("no/name")


def test_a_state_is_saved_listed_and_deleted(client: GradClient, run: TrainRun) -> None:
    step(run)
    state = run.save("good", shared=True)
    assert state.state_ref.save == "good"
    (save,) = run.view.saves
    assert (save.name, save.step, save.shared) == ("good", 1, True)
    with pytest.raises(RunConflict):
        run.delete()
    run.delete_save("good")
    run.delete()
    with pytest.raises(RunNotFound):
        run.refresh()
    with pytest.raises(InvalidJob, match=r"run\.save: name"):
        run.save("no/name")


def test_the_history_comes_whole(
    box: RunBox, run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox.runs.run.STEPS_LISTED", 2)
    for scale in range(5):
        step(run, scale)
    history = run.history()
    assert [(view.number, view.loss) for view in history] == [(n, 1 / n) for n in range(1, 6)]
    assert "0.333333" in history._repr_html_()  # type: ignore[attr-defined]


def test_a_run_is_shown_in_notebooks_without_markup_of_its_own(client: GradClient) -> None:
    run = client.train("m", optimizer=SGD, name="<b>bold</b>")
    for shown in (run._repr_html_(), client.runs()._repr_html_()):  # type: ignore[attr-defined]
        assert "&lt;b&gt;bold" in shown
        assert "<b>" not in shown
    assert "sgd" in run._repr_html_()


def test_a_history_is_drawn(run: TrainRun) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("agg")
    step(run)
    step(run, 2.0)
    for kind, values in {"loss": [1, 0.5], "grad_norm": [1, 2], "lr": [0.5, 0.5]}.items():
        (line,) = run.plot(kind).lines  # type: ignore[arg-type]
        assert np.ravel(line.get_ydata()).tolist() == values
        pyplot.close("all")
    with pytest.raises(InvalidInputs, match="grad_norm"):
        run.plot("pie")  # type: ignore[arg-type]


def test_any_loss_trains_by_its_cotangents(box: RunBox, run: TrainRun) -> None:
    f = run.model(output="hidden")
    for number in (1, 2):
        Z = torch.cat([f(shard) for shard in SHARDS])
        (Z**2).sum().backward()
        forward = box.specs[-1]
        assert forward["state"] == {"run": run.id, "step": number - 1, "save": None}
        assert forward["seed"] == step_seed(7, number)
        assert forward["wrt"] == ["a.*"]
        assert [g["shards"][0]["stream"] for g in forward["inputs"]] == [[0, 0], [0, 1]]
        found = run.apply(lr=0.1)
        assert (found.number, found.manifest.loss) == (number, None)
    posted = box.specs[-1]
    assert posted["loss"]["forward"].startswith("job")
    assert sorted(posted["loss"]["tensors"]) == ["z0", "z1"]
    assert posted["lr"] == 0.1
    with pytest.raises(InvalidJob, match="backward"):
        run.apply()


def test_a_step_that_the_box_refuses_leaves_no_cotangents_behind(
    box: RunBox, run: TrainRun
) -> None:
    f = run.model()
    f(SHARDS[0]).sum().backward()
    with box.client() as client:
        step(client.find_run(run.id))
    with pytest.raises(RunConflict):
        run.apply()
    run.refresh()
    f(SHARDS[0]).sum().backward()
    assert run.apply().number == 2


def test_cotangents_of_several_passes_are_added(run: TrainRun) -> None:
    f = run.model()
    z = f(SHARDS[0])
    loss = z.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert run._held is not None
    assert run._held[1]["z0"].tolist() == torch.full((2, 3), 2.0).tolist()
    f.zero_grad()
    with pytest.raises(InvalidJob, match="backward"):
        run.apply()


def test_a_step_of_two_forward_jobs_is_refused(run: TrainRun) -> None:
    f = run.model()
    first = f(SHARDS[0]).clone()  # fetched here
    second = f(SHARDS[1])
    with pytest.raises(InvalidJob, match="one forward job"):
        (first.sum() + second.sum()).backward()


def test_gradients_of_a_run_stay_on_the_box(run: TrainRun) -> None:
    f = run.model()
    x = SHARDS[0].clone().requires_grad_()
    with pytest.raises(InvalidInputs, match="stay on the box"):
        f(x).sum().backward()
    with pytest.raises(InvalidInputs, match="stay on the box"):
        f.apply_to(nn.Linear(1, 1))


def test_a_step_at_cotangents_takes_no_inputs(run: TrainRun) -> None:
    with pytest.raises(InvalidJob, match="inputs: expected none of these beside Cotangents"):
        run.step(inputs=SHARDS, loss=Cotangents(torch.ones(4, 3), of="job0"))


def test_the_line_of_steps_is_gone_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = StepsLine("towers", shown=True, done=4)
    with line:
        line.step(5, 0.25)
    drawn = capsys.readouterr().err.split("\r")
    assert "towers: step 4, ?" in drawn[1]
    assert not drawn[-2].strip()
    with line:
        assert "towers: step 5" in capsys.readouterr().err


def test_the_commands_know_a_run_by_id_beginning_or_name(
    box: RunBox,
    run: TrainRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gradbox.cli.runs.GradClient", box.client)

    def printed(*arguments: str) -> str:
        assert main(["runs", *arguments]) == 0
        return capsys.readouterr().out

    step(run)
    assert "towers" in printed("list")
    assert f'"id": "{run.id}"' in printed("list", "--json")
    for text in (run.id, run.id[:20], "towers"):
        assert run.id in printed("show", text)
    assert "good" in printed("save", "towers", "good", "--shared")
    (saved,) = [line for line in printed("show", "towers").splitlines() if "good" in line]
    assert {"good", run.id, "1", "True"} <= set(saved.split())
    path = tmp_path / "weights.safetensors"
    assert "2 tensors" in printed("export", "towers", "-o", str(path), "--save", "good")
    assert sorted(load_file(path)) == ["b", "w"]
    printed("export", "--save", "theirs", "-o", str(path))
    assert box.requests[-1] == "GET /v1/saves/theirs/weights"
    assert main(["runs", "export", "-o", str(path)]) == 2
    assert "expected RUN, or --save" in capsys.readouterr().err
    assert "good of" in printed("delete", "towers", "--save", "good")
    assert "deleted" in printed("delete", "towers")
    assert printed("list") == "no runs\n"
    assert main(["runs", "show", "towers"]) == 2


def test_a_run_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from gradbox import Builtin, LoRA, Optimizer, TrainRun, step_seed
from gradbox.protocol import RunView
from gradbox.runs.step import StepGradient
view = RunView(id="r", owner="a", model="m", model_version="5", optimizer={}, mode="train",
               precision="fp32", seed=0, created_s=0.0)
labels, shards = np.arange(4), [np.ones((2, 3), np.float32)] * 2
loss = {"loss": Builtin("cross_entropy"), "loss_inputs": {"labels": labels}}
assert StepGradient.of(view, 1, inputs=shards, **loss).prepare().path == "/v1/runs/r/steps/1"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
