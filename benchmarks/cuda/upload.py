"""From the host, and from a stored blob, to the device, as a job's shards go there."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from benchmarks.cuda.clock import Ceilings, Clock
from benchmarks.cuda.sizes import Sizes
from benchmarks.page import section, table, verdicts
from gradbox.protocol import ShardRef
from gradbox_engine import Group
from gradbox_engine.model.calling.shard_feed import Position, ShardFeed
from gradbox_service.store import BlobStore
from gradbox_worker.files.blob_tensors import BlobTensors

NUM_SHARDS = 4
ALLOWANCE = 0.8
ROUNDS = 5


def measure(clock: Clock, ceilings: Ceilings, sizes: Sizes) -> str:
    """Return the section."""
    draw = torch.Generator().manual_seed(3)
    shards = [
        {"x": torch.rand(sizes.uploaded_bytes // 4, generator=draw)} for _ in range(NUM_SHARDS)
    ]
    locked = [{"x": x.pin_memory() if clock.on_cuda else x} for x in (s["x"] for s in shards)]
    speeds = {
        "from page-locked memory": _speed(clock, locked),
        "from pageable memory": _speed(clock, shards),
        "from a stored blob, page cache warm": _stored(clock, shards),
    }
    rows = [
        [name, f"{speed / 1e9:.2f}", f"{speed / ceilings.upload_bytes_per_s:.2f}"]
        for name, speed in speeds.items()
    ]
    best = speeds["from page-locked memory"] / ceilings.upload_bytes_per_s
    bar = (best >= ALLOWANCE, f"{best:.2f} of the bus from page-locked memory")
    about = (
        f"{NUM_SHARDS} shards of {sizes.uploaded_bytes / 2**20:.0f} MiB through the engine's feed, "
        f"each fetched ahead; wall time. The bus is what one plain copy from page-locked memory "
        f"was seen to do: {ceilings.upload_bytes_per_s / 1e9:.1f} GB/s."
    )
    head = ["", "GB/s", "of the bus"]
    return section("From the host to the device", about, table(head, rows), verdicts([bar]))


def _speed(clock: Clock, shards: list[dict[str, Tensor]]) -> float:
    return _best(clock, lambda: Group("z", shards), shards)


def _stored(clock: Clock, shards: list[dict[str, Tensor]]) -> float:
    with tempfile.TemporaryDirectory(prefix="gradbox-bench-") as folder:
        blobs = BlobStore(Path(folder))
        refs = []
        for shard in shards:
            content = save(shard)
            digest = hashlib.sha256(content).hexdigest()
            blobs.put(digest, [content])
            refs.append(ShardRef(blob=digest))
        with BlobTensors(blobs, device=clock.device) as tensors:
            return _best(clock, lambda: Group("z", tensors.shards(refs)), shards)


def _best(
    clock: Clock,
    group: Callable[[], Group],
    shards: list[Mapping[str, Tensor]] | list[dict[str, Tensor]],
) -> float:
    """Return bytes a second of the best of some rounds."""
    num_bytes = sum(x.nbytes for shard in shards for x in shard.values())
    least = float("inf")
    for _ in range(ROUNDS):
        feed = ShardFeed([group()], clock.device, widened=False)
        began = time.perf_counter()
        for index in range(len(shards)):
            feed.take(Position(0, index))
            feed.prefetch(Position(0, index + 1) if index + 1 < len(shards) else None)
        if clock.on_cuda:
            torch.cuda.synchronize(clock.device)
        least = min(least, time.perf_counter() - began)
    return num_bytes / least
