"""The same gradient by the code one would write first, all graphs alive, in a process of its own.

Run as `python -m gradbox_worker.demo.naive NUM_PAIRS SHARD_SIZE OUT`: writes the gradients to OUT
(safetensors) and prints loss and memory as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gradbox_engine import shard_stream
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.demo import task


def naive_gradient(size: task.Size, out: Path) -> dict[str, float]:
    """Differentiate over one graph of all shards and save the gradients by parameter name."""
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModel.from_pretrained(task.model_folder(), use_safetensors=True).train()
    towers = task.tokenised(size)
    peak = PeakMemory(torch.device("cpu"))
    embeddings: dict[str, Tensor] = {}
    for group, (tower, shards) in enumerate(towers.items()):
        outputs = []
        for index, shard in enumerate(shards):
            with shard_stream(task.SEED, group, index):
                hidden = getattr(model(**shard), task.OUTPUT)
                outputs.append(task.mean_pooling(hidden, shard))
        embeddings[tower] = torch.cat(outputs)
    loss = task.info_nce(embeddings["queries"], embeddings["passages"])
    torch.autograd.backward(loss)
    peak_bytes, before_bytes = peak.measure()
    save_file(
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, str(out)
    )
    return {"loss": loss.item(), "peak_bytes": peak_bytes, "before_bytes": before_bytes}


if __name__ == "__main__":
    num_pairs, shard_size, out = sys.argv[1:]
    size = task.Size(num_pairs=int(num_pairs), shard_size=int(shard_size))
    print(json.dumps(naive_gradient(size, Path(out))))
