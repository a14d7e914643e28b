"""The task that every peer does: InfoNCE over pairs of real text through MiniLM, dropout on.

A pair is the beginning of a documentation text and what follows it, NUM_TOKENS each. So nothing is
padded, and all peers do the same work: sentence-transformers would cut padding off, others not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_worker.demo.task import mean_pooling, model_folder
from gradbox_worker.demo.text import documentation_pairs

SEED = 0
TOWERS = ("queries", "passages")
NUM_TOKENS = 32
NUM_TEXTS = 1000  # about 640 of them are long enough

Tokens = dict[str, Tensor]


class Encoder(nn.Module):
    """MiniLM with mean pooling: tokens (B, T) to embeddings (B, 384)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(model_folder(), use_safetensors=True)
        self.train()

    def forward(self, **tokens: Tensor) -> Tensor:
        return mean_pooling(self.model(**tokens).last_hidden_state, tokens)


@dataclass(frozen=True)
class Workload:
    """How many pairs, and how many samples a shard holds."""

    num_pairs: int
    shard: int = 16

    @cached_property
    def batches(self) -> dict[str, Tokens]:
        """Return the whole batch of each tower, token tensors of shape (num_pairs, NUM_TOKENS).

        Raises:
            ValueError: this Python does not document that much.
        """
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_folder())
        texts = [f"{query} {passage}" for query, passage in documentation_pairs(NUM_TEXTS)]
        plain = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        width = NUM_TOKENS - 2  # [CLS] and [SEP] stand around
        long = [ids for ids in plain if len(ids) >= 2 * width][: self.num_pairs]
        if len(long) < self.num_pairs:
            raise ValueError(f"expected at most {len(long)} pairs, got {self.num_pairs}")
        return {
            tower: _tokens(
                [
                    [tokenizer.cls_token_id, *ids[start : start + width], tokenizer.sep_token_id]
                    for ids in long
                ]
            )
            for tower, start in zip(TOWERS, (0, width), strict=True)
        }

    @cached_property
    def shards(self) -> dict[str, list[Tokens]]:
        """Return the same tokens cut into shards."""
        return {
            tower: [
                {name: tensor[start : start + self.shard] for name, tensor in tokens.items()}
                for start in range(0, self.num_pairs, self.shard)
            ]
            for tower, tokens in self.batches.items()
        }


def _tokens(rows: list[list[int]]) -> Tokens:
    input_ids = torch.tensor(rows)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def gradients(module: nn.Module, *, prefix: str = "") -> dict[str, Tensor]:
    """Return the gradients of the parameters below `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): parameter.grad
        for name, parameter in module.named_parameters()
        if name.startswith(prefix) and parameter.grad is not None
    }


def relative_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return ‖left − right‖ / ‖right‖ over all parameters that either has."""
    zero = torch.zeros(())
    names = left.keys() | right.keys()
    apart = sum(
        float((left.get(n, zero) - right.get(n, zero)).double().square().sum()) for n in names
    )
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return float((apart / size) ** 0.5)
