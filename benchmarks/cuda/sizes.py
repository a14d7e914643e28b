"""How large the problems are: for a GPU, and small enough to try every line on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts, and how many rounds are measured."""

    rounds: int
    copied_bytes: int
    side: int  # of the square matrices
    text_shard: int
    num_tokens: int
    text_layers: int
    image_shard: int
    image_side: int
    image_blocks: tuple[int, ...]
    num_shards: int  # of each task
    samples: dict[str, int]  # of the per-sample workloads, by name; others as they are
    decoder_layers: int
    decoder_width: int
    decoder_tokens: int
    decoder_samples: int
    decoder_shard: int
    uploaded_bytes: int
    small_shards: tuple[int, ...]  # where a shard's kernels are short, for CUDA graphs
    mixed_depth: int


FULL: Final = Sizes(
    rounds=7,
    copied_bytes=2 * 2**30,
    side=8192,
    text_shard=256,
    num_tokens=32,
    text_layers=6,
    image_shard=32,
    image_side=224,
    image_blocks=(3, 4, 6, 3),
    num_shards=8,
    samples={},
    decoder_layers=24,
    decoder_width=2048,
    decoder_tokens=512,
    decoder_samples=256,
    decoder_shard=8,
    uploaded_bytes=256 * 2**20,
    small_shards=(8, 256),
    mixed_depth=16,
)

DRY: Final = Sizes(
    rounds=2,
    copied_bytes=2**20,
    side=64,
    text_shard=2,
    num_tokens=8,
    text_layers=1,
    image_shard=2,
    image_side=32,
    image_blocks=(1, 1, 1, 1),
    num_shards=3,
    samples={"W1": 2, "W2 B=256": 4, "W3": 2, "W5": 2},
    decoder_layers=2,
    decoder_width=64,
    decoder_tokens=16,
    decoder_samples=6,
    decoder_shard=2,
    uploaded_bytes=2**20,
    small_shards=(2,),
    mixed_depth=1,
)
