"""Two towers with a learned temperature: 64 sentences, each to be told from the others' passages.

    gradbox up --models examples/models.toml &
    python examples/two_towers.py

The loss couples all 16 shards; the scale of its similarities, 1/temperature, is an input of the
loss that requires grad. Block, scale and optimizer live on the box; what a step fetches is a
receipt. The first step fetches its gradients too, beside local autograd and, where it is installed,
CachedMultipleNegativesRankingLoss of sentence-transformers, whose scale is fixed.

Source: Radford et al. 2021, "CLIP" (the scale); Gao et al. 2021, "GradCache" (the replay).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from digits import flat, report
from documentation import cached_mnrl, minilm, pairs, pooled, tokenised
from pictures import curves, wanted
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import GradClient, Optimizer, TrainStep

BLOCK, SHARD_SIZE, SCALE, NUM_STEPS = "encoder.layer.5", 8, 20.0, 8


def ranking(queries: Tensor, passages: Tensor, log_scale: Tensor) -> Tensor:
    """Return the mean cross-entropy of telling each query's passage from all others."""
    scores_BB = F.normalize(queries, dim=1) @ F.normalize(passages, dim=1).T
    return F.cross_entropy(log_scale.exp() * scores_BB, torch.arange(scores_BB.shape[0]))


def main() -> None:
    picture, model = wanted(__doc__), minilm().eval()
    texts = dict(zip(("queries", "passages"), pairs(64), strict=True))
    inputs = {name: tokenised(side, shard_size=SHARD_SIZE) for name, side in texts.items()}
    log_scale = torch.tensor(SCALE).log().requires_grad_()
    losses, scales = [], [SCALE]
    with GradClient() as client:
        of_scale = {"wrt": "loss_inputs.log_scale", "lr": 0.05}
        optimizer = Optimizer("adam", lr=2e-5, groups=[of_scale])
        run = client.train("minilm", optimizer=optimizer, wrt=BLOCK, mode="eval")
        for _ in range(NUM_STEPS):
            step = run.step(
                inputs=inputs,
                output="last_hidden_state",
                readout=pooled,
                loss=ranking,
                loss_inputs={"log_scale": log_scale},
                returns=("grads",) if run.num_steps == 0 else (),
            )
            losses.append(step.loss)
            print(f"step {step.number}: loss {step.loss:.4f}, gradient norm {step.grad_norm:.3f}")
            if step.number == 1:
                compare(step, model, texts, inputs, log_scale)
            if picture:  # the weights of the block come along
                scales.append(run.weights()["loss_inputs.log_scale"].exp().item())
    curves(picture, {"loss": {"": losses}, "scale of similarities": {"": scales}})


def compare(step: TrainStep, model: nn.Module, texts: Any, inputs: Any, log_scale: Tensor) -> None:
    """Print how far the gradients of the first step are from those of others."""
    block = {name: p for name, p in model.named_parameters() if name.startswith(BLOCK)}
    z = (torch.cat([pooled(model(**x)[0], x) for x in group]) for group in inputs.values())
    local = torch.autograd.grad(ranking(*z, log_scale), [*block.values(), log_scale])
    found = flat(step.grads[name] for name in (*block, "loss_inputs.log_scale"))
    report("the gradient", found, flat(local), within=1e-4)
    if find_spec("sentence_transformers"):
        peer = cached_mnrl(texts.values(), scale=SCALE, shard_size=SHARD_SIZE)
        theirs = flat(peer[name] for name in block)
        report("that of the block", found[:-1], theirs, by="CachedMNRL", within=1e-4)


if __name__ == "__main__":
    main()
