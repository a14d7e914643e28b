"""Runs with an adapter, against a model that peft adapts and a plain loop trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox.protocol import LoRASpec, OptimizerSpec, step_seed
from gradbox_engine import shard_stream
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.runs.adapters import adapted
from gradbox_worker.work import Finished
from tests.worker.runs import zoo
from tests.worker.runs.device import Device, same, shards_at

SEED = 7
LORA = LoRASpec(rank=2, alpha=4, targets=["query", "val*"], dropout=0.2)
ADAM = OptimizerSpec(name="adam", options={"lr": 0.02})


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def plain() -> nn.Module:
    """Return what peft makes of the model, as the docs say how."""
    from peft import LoraConfig, inject_adapter_in_model  # seconds, which collecting need not take

    model = zoo.attention().train()
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["query", "value"])
    with torch.random.fork_rng():
        torch.manual_seed(step_seed(SEED, 0))
        return inject_adapter_in_model(config, model)


def test_steps_are_those_of_a_model_that_peft_adapts(device: Device) -> None:
    from peft import get_peft_model_state_dict

    model = plain()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.02)
    run = device.begin("attention", optimizer=ADAM, adapter=LORA, seed=SEED)
    for step in range(1, 31):
        if step == 15:
            device.states.close()  # from a file, too
        if step == 20:
            device.restart()
        optimizer.zero_grad()
        zs = []
        for place, shard in enumerate(shards_at(step)):
            with shard_stream(step_seed(SEED, step), group=0, shard=place):
                zs.append(model(shard["0"]))
        loss = (torch.cat(zs) ** 2).sum()
        loss.backward()
        optimizer.step()
        receipt, _ = device.step(run, shards_at(step))
        assert receipt.loss == pytest.approx(loss.item(), rel=1e-10)
    _, found = device.written(run)
    # As of a PeftModel, which has the model in two attributes.
    local = get_peft_model_state_dict(model)
    expected = {f"weights/base_model.model.{name}": tensor for name, tensor in local.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


EIGHT = [
    LoRASpec(rank=rank, alpha=8, targets=targets, dropout=0.1)
    for rank in (1, 2, 3, 5)
    for targets in (["query"], ["*"])
]


def test_eight_runs_on_one_base_do_not_disturb_each_other(device: Device) -> None:
    def trained(which: list[int]) -> dict[int, dict[str, Tensor]]:
        device.restart()
        runs = {
            i: device.begin("attention", adapter=EIGHT[i], optimizer=ADAM, seed=i) for i in which
        }
        if len(which) > 1:
            runs[9] = device.begin("attention", seed=9)  # and one that trains all of the model
        for step in range(1, 4):
            for i, run in runs.items():
                device.step(run, shards_at(step + 10 * i))
        return {i: device.state(run) for i, run in runs.items()}

    base = device.registry.get("attention").module
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    flags = [parameter.requires_grad for parameter in base.parameters()]
    together = trained([*range(8)])
    for i in range(8):
        assert same(together[i], trained([i])[i])
    after = base.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [parameter.requires_grad for parameter in base.parameters()] == flags


def test_the_base_is_there_once(device: Device) -> None:
    for seed, lora in enumerate(EIGHT):
        device.step(
            device.begin("attention", adapter=lora, optimizer=ADAM, seed=seed), shards_at(1)
        )
    base = device.registry.get("attention").module
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    models = device.states._structures[base].values()
    own = [p for model in models for p in model.parameters() if p.data_ptr() not in shared]
    widths = {"query": 5 + 6, "*": 3 * (5 + 6) + 6 + 3}
    adapter_bytes = 8 * sum(lora.rank * widths[lora.targets[0]] for lora in EIGHT)
    assert len(models) == 8
    assert sum(parameter.nbytes for parameter in own) == adapter_bytes
    # The state has them once more, and twice as moments, beside counts of steps.
    assert 3 * adapter_bytes < device.states.num_bytes() < 3.1 * adapter_bytes


def test_seeds_draw_the_first_numbers() -> None:
    first, second = (
        adapted(zoo.attention(), LORA, seed=seed).get_parameter("query.lora_A.default.weight")
        for seed in (0, 1)
    )
    assert not torch.equal(first, second)


def test_a_model_that_leaves_the_device_takes_its_structures_along(device: Device) -> None:
    run = device.begin("attention", adapter=LORA)
    device.step(run, shards_at(1))
    assert len(device.states._structures) == 1
    device.states.rest()
    device.registry.drop_idle(but="", wanted_bytes=2**40)
    assert len(device.states._structures) == 0
    device.step(run, shards_at(2))


def test_another_job_runs_with_a_runs_adapter(device: Device) -> None:
    run = device.begin("attention", adapter=LORA, optimizer=ADAM)
    outputs = []
    for step in (0, 1):
        if step:
            device.step(run, shards_at(step))
        work, answer = device.run(device.forward(run))
        assert isinstance(answer, Finished)
        from tests.boxes import tensors_in

        outputs.append(tensors_in(work.result_path)["outputs/z"])
    base = torch.cat([zoo.attention()(shard["0"]) for shard in shards_at(0)])
    torch.testing.assert_close(outputs[0], base.detach())
    assert not torch.allclose(outputs[1], outputs[0])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["querry"], "got 'querry', which is none of them; did you mean 'query'"),
        (["query", "norm"], "got 'norm'"),
    ],
)
def test_a_target_that_is_not_there_is_named(
    device: Device, targets: list[str], message: str
) -> None:
    lora = LoRASpec(rank=1, alpha=1, targets=targets)
    run = device.begin("attention", adapter=lora)
    _, answer = device.run(device.spec(run, shards_at(1)))
    assert isinstance(answer, Caught)
    assert message in answer.problem.detail


def test_a_worker_without_peft_says_so(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    run = device.begin("attention", adapter=LORA)
    answer: Any
    _, answer = device.run(device.spec(run, shards_at(1)))
    assert isinstance(answer, Caught)
    assert "expected a worker with peft installed" in answer.problem.detail
