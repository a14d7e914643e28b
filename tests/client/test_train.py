"""Training on a box that runs: steps, states, saves, and what is left of them after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbox import (
    Forward,
    GradboxError,
    GradClient,
    Gradient,
    Optimizer,
    RunConflict,
    RunNotFound,
    TrainRun,
)
from tests.boxes import TestBox, Up
from tests.case_models import mlp
from tests.client.conftest import write_models
from tests.device import DEVICE
from tests.worker.box import eventually

SGD = Optimizer("sgd", lr=0.1, momentum=0.9)
MODEL = "mlp"


def shards_at(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2)]


def loss(z: Tensor) -> Tensor:
    return z.square().mean() + z.mean(0).exp().sum()


def plain(steps: int) -> dict[str, Tensor]:
    """Return the weights after some steps of a loop without a box."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(torch.cat([model(shard) for shard in shards_at(step)])).backward()
        optimizer.step()
    return model.state_dict()


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(torch.allclose(found[n], wanted[n], rtol=1e-12, atol=1e-12) for n in wanted)


def made(run: TrainRun, steps: int) -> None:
    """Make the run's steps up to this one."""
    for step in range(run.num_steps + 1, steps + 1):
        assert run.step(inputs=shards_at(step), loss=loss).number == step


def test_a_run_is_a_plain_loop_whose_states_can_be_read_and_saved(box: TestBox) -> None:
    with box.client() as client, box.client(box.other_token) as other:
        run = client.train(MODEL, optimizer=SGD, name="towers")
        made(run, 3)
        assert [step.number for step in run.history()] == [1, 2, 3]
        assert close(run.weights(), plain(3))
        assert close(run.at(1).weights(), plain(1))
        state = run.save(f"good-{box.url[-5:].strip('/:')}", shared=True)
        made(run, 4)
        assert close(
            other.submit(  # what is shared, everybody may read
                Gradient(model=MODEL, inputs=shards_at(1), loss=loss, weights=state)
            )
            .result()
            .grads,
            _grads_at(plain(3)),
        )
        with pytest.raises(RunNotFound):
            other.submit(Forward(model=MODEL, inputs=shards_at(1), weights=run))
        fetched = other.saved(str(state.state_ref.save))
        assert close(fetched.weights(), plain(3))
        theirs = other.train(MODEL, optimizer=SGD, start=fetched)
        made(theirs, 4)
        assert close(theirs.weights(), plain(4))
        theirs.delete()
        on = client.train(MODEL, optimizer=SGD, start=state)
        assert on.num_steps == 3
        made(on, 5)
        assert close(on.weights(), plain(5))
        third = client.train(MODEL, optimizer=SGD, start=on)  # which no file has yet
        made(third, 6)
        assert close(third.weights(), plain(6))
        third.delete()
        with pytest.raises(RunConflict):
            run.delete()
        assert run.view.saves
        run.delete_save(run.view.saves[0].name)
        run.delete()
        on.delete()


def test_cotangents_of_any_loss_make_a_step(box: TestBox) -> None:
    with box.client() as client:
        run = client.train(MODEL, optimizer=SGD)
        made(run, 1)
        f = run.model()
        loss(torch.cat([f(shard) for shard in shards_at(2)])).backward()
        assert run.apply().number == 2
        made(run, 3)
        assert close(run.weights(), plain(3))
        run.delete()


def test_a_second_client_hears_that_the_run_is_elsewhere(box: TestBox) -> None:
    with box.client() as client:
        run = client.train(MODEL, optimizer=SGD)
        same = client.find_run(run.id)
        made(run, 1)
        assert same.step(inputs=shards_at(1), loss=loss).number == 1  # with the same content
        made(run, 2)
        with pytest.raises(RunConflict, match="has made 2 steps"):
            same.step(inputs=shards_at(7), loss=loss)
        with pytest.raises(GradboxError):
            run.step(inputs=shards_at(1), loss=lambda z: z.square())
        assert run.refresh().num_steps == 2
        run.delete()


@pytest.mark.slow  # tests/cluster/test_runs.py and tests/worker/runs/test_recovery.py kill too
def test_after_a_kill_the_same_bits_follow(tmp_path: Path) -> None:
    models = write_models(tmp_path / "models.toml")
    arguments = ("--port", "0", "--models", str(models), "--device", str(DEVICE))
    data, killed = tmp_path / "data", 0
    up = Up(data, *arguments)
    try:
        url = up.wait_ready()
        token = (data / "owner-token").read_text().strip()
        with GradClient(url, token) as client:
            undisturbed = client.train(MODEL, optimizer=SGD)
            made(undisturbed, 6)
            run = client.train(MODEL, optimizer=SGD)
            for steps in (2, 4):
                made(run, steps)
                killed = eventually(lambda: device_of(up.process.pid), other_than=killed)
                os.kill(killed, signal.SIGKILL)
            made(run, 6)
            found, wanted = run.weights(), undisturbed.weights()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    finally:
        up.stop()
        up._output.close()
    up = Up(data, *arguments)
    try:
        with GradClient(up.wait_ready(), token) as client:
            again = client.find_run(run.id)
            assert again.num_steps == 6
            assert all(torch.equal(again.weights()[name], wanted[name]) for name in wanted)
    finally:
        up.stop()
        up._output.close()


def device_of(up: int) -> int:
    """Return the device process of a box; ValueError if there is not one."""
    below, found = [up], []
    while below:
        pid = below.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        below += map(int, children)
        found += [c for c in children if "gradbox-device" in Path(f"/proc/{c}/comm").read_text()]
    (device,) = found
    return int(device)


def _grads_at(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    model = mlp()
    model.load_state_dict(weights)
    loss(torch.cat([model(shard) for shard in shards_at(1)])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
