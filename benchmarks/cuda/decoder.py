"""A set loss over many texts through a decoder in bfloat16, whose graphs no device would hold.

The weights are bfloat16 as they are, the loss sees float32. A part of the samples shows what one
graph of all would take: its peak grows by the sample, and the table states it for all of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda import models
from benchmarks.cuda.clock import Clock
from benchmarks.cuda.models import Shard
from benchmarks.cuda.sizes import Sizes
from benchmarks.page import mebibytes, section, table
from gradbox_engine import Group, Objective, SetGradient, set_gradient

TRIED_SHARDS = (1, 2)


def measure(clock: Clock, sizes: Sizes) -> str:
    """Return the section."""
    model = models.decoder(sizes).to(clock.device, torch.bfloat16).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    draw = torch.Generator().manual_seed(2)
    size = (sizes.decoder_shard, sizes.decoder_tokens)
    num_shards = -(-sizes.decoder_samples // sizes.decoder_shard)
    config: Any = model.config
    shards = [
        {"input_ids": torch.randint(config.vocab_size, size, generator=draw)}
        for _ in range(num_shards)
    ]

    def gradient(retain: int | str = 0, shards: list[Shard] = shards) -> SetGradient:
        return set_gradient(
            model,
            [Group("z", shards)],
            Objective(models.info_nce),
            mode="train",
            output="last_hidden_state",
            readout=_pooled,
            retain="auto" if retain == "auto" else int(retain),
        )

    gradient(shards=shards[:2])
    rows = []
    for name, retain in (("nothing kept", 0), ("what is free", "auto")):
        run = partial(gradient, retain)
        peak = clock.peak_bytes(run)
        seconds = clock.seconds(run)
        result = run()
        rows.append(
            [
                f"gradbox, {name}",
                f"{seconds:.2f}",
                f"{len(shards) * sizes.decoder_shard * sizes.decoder_tokens / seconds:.0f}",
                "n/a" if peak is None else mebibytes(peak),
                f"{result.retained} of {len(shards)}",
                f"{result.replay_difference:.1e}",
            ]
        )
    naive = [clock.peak_bytes(partial(_one_graph, model, shards[:num])) for num in TRIED_SHARDS]
    first, second = naive
    grown = "n/a"
    if first is not None and second is not None:
        grown = mebibytes(first + (second - first) * (num_shards - 1))
    rows.append(["one graph of all, from the growth by a shard", "", "", grown, "", ""])
    head = ["", "s", "tokens/s", "peak MiB", "graphs kept", "replay difference"]
    about = (
        f"{num_parameters / 1e9:.2f} billion parameters in bfloat16, random weights, dropout on; "
        f"{num_shards * sizes.decoder_shard} texts of {sizes.decoder_tokens} tokens in "
        f"{num_shards} shards, contrasted with each other."
    )
    return section("A large decoder", about, table(head, rows))


def _pooled(hidden: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return hidden.mean(1)


def _one_graph(model: torch.nn.Module, shards: list[Shard]) -> None:
    device = next(model.parameters()).device
    zs = [model(input_ids=s["input_ids"].to(device)).last_hidden_state.mean(1) for s in shards]
    models.info_nce(torch.cat(zs).float()).backward()
    model.zero_grad(set_to_none=True)
