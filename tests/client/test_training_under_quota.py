"""A loop that trains goes on for ever under a quota of a few steps' bytes, without a pause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradbox import Builtin, GradClient, Gradient, Retry
from tests.boxes import TestBox, twin_box
from tests.client import zoo

NUM_STEPS = 15
STEP_BYTES = 2 * sum(p.numel() * 8 for p in zoo.large().parameters())  # weights, and gradients
LEARNING_RATE = 0.1

Step = Callable[[nn.Module], None]
Loop = Callable[[GradClient, list[Tensor], Tensor], Step]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    """A box on which everybody may have what five steps take."""
    folder = tmp_path_factory.mktemp("quota")
    models = folder / "models.toml"
    source = json.dumps(f"{zoo.__file__}:large")
    models.write_text(f'[models.large]\nbuilder = "python"\nsource = {source}\n')
    with twin_box(folder / "data", models=models, owner_quota_bytes=5 * STEP_BYTES) as box:
        yield box


def by_jobs(client: GradClient, shards: list[Tensor], labels: Tensor) -> Step:
    """Take the loop of docs/training.md."""

    def step(model: nn.Module) -> None:
        job = Gradient(
            model="large",
            inputs=shards,
            loss=Builtin("cross_entropy"),
            loss_inputs={"labels": labels},
            weights=model.state_dict(),
        )
        client.submit(job).result().apply_to(model)

    return step


def by_remote_autograd(client: GradClient, shards: list[Tensor], labels: Tensor) -> Step:
    """Take the loop of docs/remote_autograd.md."""
    f = client.model("large")

    def step(model: nn.Module) -> None:
        f.weights = dict(model.named_parameters())
        f.zero_grad()
        cross_entropy(torch.cat([f(shard) for shard in shards]), labels).backward()
        f.apply_to(model)

    return step


@pytest.mark.parametrize("loop", [by_jobs, by_remote_autograd])
def test_a_training_loop_runs_on_within_a_quota_of_five_steps(
    small: TestBox, loop: Loop, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shards = list(torch.randn(12, 16, dtype=torch.float64).split(5))
    labels = torch.randint(4, (12,))
    trained, naive = zoo.large(), zoo.large()
    # Another client of the same owner, so that nothing is known from the loop before; it waits for
    # nothing, so that a step for which there is no room at once ends the test.
    with small.client(retry=Retry(patience_s=0.0)) as client:
        step = loop(client, shards, labels)
        for _ in range(NUM_STEPS):
            for model in (trained, naive):
                model.zero_grad()
            step(trained)
            cross_entropy(naive(torch.cat(shards)), labels).backward()
            for model in (trained, naive):
                torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    for found, expected in zip(trained.parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
