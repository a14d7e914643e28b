"""A model whose modules lie on different devices gives what it gives on one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.replay import retention
from tests.boxes import ROOT
from tests.engine.spread_cases import CASES, SHARDS, coupled, spread, whole

ORDERS = ("pretended, cpu", "cpu, pretended")


@pytest.fixture(scope="module")
def differences() -> dict[str, float | str]:
    """Compare in a process of its own, for a pretended device stays in one."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.spread_model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, float | str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_model_over_two_devices_gives_what_it_gives_on_one(
    differences: dict[str, float | str], case: str, order: str
) -> None:
    found = differences[f"{case} on {order}"]
    assert isinstance(found, float), found
    assert found <= 1e-12


def test_a_device_refuses_what_is_on_the_other_one(
    differences: dict[str, float | str],
) -> None:
    """Else none of the tests above could fail."""
    assert "same device" in str(differences["not moved"])


def test_the_budget_is_that_of_the_device_with_the_least_room_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {torch.device("cuda", 0): 1000.0, torch.device("cuda", 1): 300.0}
    monkeypatch.setattr(retention, "_free_bytes", free.__getitem__)
    budget = retention.graph_budget("auto", list(free), sums_bytes=80)
    assert budget.admit(int(520 / retention.HELD_FACTOR / 2))
    other = retention.graph_budget("auto", list(free), sums_bytes=80)
    assert not other.admit(int(540 / retention.HELD_FACTOR / 2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
@pytest.mark.parametrize("retain", [0, "auto"])
def test_a_model_over_two_gpus_gives_what_it_gives_on_one(retain: int | str) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    models = [whole().to(gpus[0]), spread(*gpus)]
    before = torch.cuda.get_rng_state_all()
    found = [
        set_gradient(
            model, [Group("z", SHARDS)], Objective(coupled), mode="train", seed=1, retain=retain
        )
        for model in models
    ]
    for name, gradient in found[0].grads.items():
        assert torch.allclose(found[1].grads[name].to(gpus[0]), gradient, rtol=1e-10, atol=1e-12)
    assert {g.device for g in found[1].grads.values()} == set(gpus)
    after = torch.cuda.get_rng_state_all()
    assert all(map(torch.equal, before, after))
