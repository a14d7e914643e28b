"""What a box adds to the engine's call: the same job directly, and from submit to result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.cuda import models
from benchmarks.cuda import sizes as all_sizes
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.sizes import Sizes
from benchmarks.measure import relative_difference
from benchmarks.page import section, table, verdicts
from gradbox import GradClient, Gradient
from gradbox_engine import Group, Objective, set_gradient
from gradbox_worker.demo.box import running_box

SAME = 1e-4
ALLOWANCE = 1.15
NUM_SHARDS = 64


def encoder(dry: bool = False) -> nn.Module:
    """Build the model, for a box."""
    return models.TextEncoder((all_sizes.DRY if dry else all_sizes.FULL).text_layers)


def measure(clock: Clock, sizes: Sizes) -> str:
    """Return the section."""
    dry = sizes is all_sizes.DRY
    num_shards = 3 if dry else NUM_SHARDS
    device = "cuda:0" if clock.on_cuda else "cpu"
    on_host = models.texts(num_shards, sizes.text_shard, sizes, torch.device("cpu"))
    model = encoder(dry).to(clock.device)

    def direct() -> dict[str, torch.Tensor]:
        found = set_gradient(
            model, [Group("z", on_host)], Objective(models.info_nce), mode="train", retain=0
        )
        return {name: gradient.cpu() for name, gradient in found.grads.items()}

    registered = (
        '[models.encoder]\nbuilder = "python"\nsource = "benchmarks.cuda.service:encoder"\n'
        f"kwargs = {{dry = {str(dry).lower()}}}\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder,
        running_box(Path(folder), registered=registered, device=device) as (url, token),
        GradClient(url=url, token=token) as client,
    ):

        def through() -> dict[str, torch.Tensor]:
            job = Gradient(
                model="encoder", inputs=on_host, loss=models.info_nce, mode="train", retain=0
            )
            return dict(client.submit(job).result().grads)

        apart = relative_difference(through(), direct())
        times = clock.interleaved({"direct": direct, "box": through}, rounds=sizes.rounds)
    ratio = times["box"].ratio(times["direct"])
    names = {"direct": "the engine, gradients copied to the host", "box": "the same through a box"}
    rows = [[title, f"{times[name].median:.3f}"] for name, title in names.items()]
    bars = [
        (ratio.median <= ALLOWANCE, f"a box costs {ratio} of the call, at most {ALLOWANCE}"),
        (apart <= SAME, f"its gradient differs by {apart:.1e}"),
    ]
    about = f"{num_shards} shards of {sizes.text_shard} texts through MiniLM; over loopback."
    return section("What a box adds", about, table(["", "s"], rows), verdicts(bars))
