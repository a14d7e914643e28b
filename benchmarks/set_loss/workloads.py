"""What every peer is asked for: the InfoNCE gradient over pairs, through one of three models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from benchmarks.set_loss.encoders import ConvEncoder, Encoder, RecurrentEncoder
from benchmarks.set_loss.pairs import TOWERS, Batch, image_pairs, sequence_pairs, text_pairs

SEED = 0
NUM_TOKENS = 32

ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "minilm": Encoder,
    "cnn": ConvEncoder,
    "lstm": RecurrentEncoder,
}


@dataclass(frozen=True)
class Workload:
    """How many pairs, how many samples a shard holds, and through what they go.

    Two towers share one model, so there are 2 × num_pairs samples.
    """

    num_pairs: int
    shard: int = 16
    task: str = "minilm"
    num_tokens: int = NUM_TOKENS  # of a text; the other tasks have a size of their own
    device: str = "cpu"

    def encoder(self) -> nn.Module:
        """Return a fresh model in train mode, all of it in memory.

        Weights mapped from a file come page by page as they are used, the rows of an embedding as
        their tokens come: that would count as memory of the step, and grow with the samples.
        """
        encoder = ENCODERS[self.task]().to(self.device)
        for parameter in encoder.parameters():
            parameter.data = parameter.data.clone()
        return encoder

    @cached_property
    def batches(self) -> dict[str, Batch]:
        """Return the whole batch of each tower."""
        if self.task == "minilm":
            batches = text_pairs(self.num_pairs, num_tokens=self.num_tokens)
        elif self.task == "cnn":
            batches = image_pairs(self.num_pairs)
        else:
            batches = sequence_pairs(self.num_pairs)
        return {
            tower: {name: tensor.to(self.device) for name, tensor in batch.items()}
            for tower, batch in batches.items()
        }

    @cached_property
    def shards(self) -> dict[str, list[Batch]]:
        """Return the same samples cut into shards."""
        return {
            tower: [
                {name: tensor[start : start + self.shard] for name, tensor in batch.items()}
                for start in range(0, self.num_pairs, self.shard)
            ]
            for tower, batch in self.batches.items()
        }

    @property
    def num_shards(self) -> int:
        """How many shards both towers have together."""
        return len(TOWERS) * -(-self.num_pairs // self.shard)


def gradients(module: nn.Module, *, prefix: str = "") -> dict[str, Tensor]:
    """Return the gradients of the parameters below `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): parameter.grad
        for name, parameter in module.named_parameters()
        if name.startswith(prefix) and parameter.grad is not None
    }
