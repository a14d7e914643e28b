"""The samples of the replay benchmarks: pairs, one half for each tower.

Text pairs are the beginning of a documentation text and what follows it, cut to one length. So
nothing is padded, and all peers do the same work: sentence-transformers would cut padding off,
others not. Images are two noisy views of one random image, sequences two noisy copies of one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.set_loss.encoders import VOCABULARY
from gradbox_worker.demo.task import model_folder
from gradbox_worker.demo.text import documentation_pairs

TOWERS = ("queries", "passages")
NUM_TEXTS = 1000  # about 640 of them are long enough for 32 tokens
IMAGE_SIZE = 32
SEQUENCE = 64
NOISE = 0.3

Batch = dict[str, Tensor]


def text_pairs(num_pairs: int, *, num_tokens: int) -> dict[str, Batch]:
    """Return token tensors of shape (num_pairs, num_tokens) for each tower.

    Raises:
        ValueError: this Python does not document that much.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
    texts = [f"{query} {passage}" for query, passage in documentation_pairs(NUM_TEXTS)]
    plain = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    width = num_tokens - 2  # [CLS] and [SEP] stand around
    long = [ids for ids in plain if len(ids) >= 2 * width][:num_pairs]
    if len(long) < num_pairs:
        raise ValueError(f"expected at most {len(long)} pairs, got {num_pairs}")
    return {
        tower: _tokens(
            [
                [tokenizer.cls_token_id, *ids[start : start + width], tokenizer.sep_token_id]
                for ids in long
            ]
        )
        for tower, start in zip(TOWERS, (0, width), strict=True)
    }


def image_pairs(num_pairs: int) -> dict[str, Batch]:
    """Return pixels of shape (num_pairs, 3, IMAGE_SIZE, IMAGE_SIZE) for each tower."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(num_pairs, 3, IMAGE_SIZE, IMAGE_SIZE, generator=draw)
    return {
        tower: {"pixels": images + NOISE * torch.randn(images.shape, generator=draw)}
        for tower in TOWERS
    }


def sequence_pairs(num_pairs: int) -> dict[str, Batch]:
    """Return tokens of shape (num_pairs, SEQUENCE) for each tower."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (num_pairs, SEQUENCE), generator=draw)
    batches: dict[str, Batch] = {}
    for tower in TOWERS:
        noisy = torch.rand(tokens.shape, generator=draw) < NOISE
        other = torch.randint(VOCABULARY, tokens.shape, generator=draw)
        batches[tower] = {"tokens": torch.where(noisy, other, tokens)}
    return batches


def _tokens(rows: list[list[int]]) -> Batch:
    input_ids = torch.tensor(rows)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
