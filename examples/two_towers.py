"""Two towers with a learned temperature: 64 sentences, each to be told from the others' passages.

    gradbox up --models examples/models.toml &
    python examples/two_towers.py

The loss couples all 16 shards; the scale of its similarities, 1/temperature, is an input of the
loss that requires grad. At the first step local autograd is beside it, and, where it is installed,
CachedMultipleNegativesRankingLoss of sentence-transformers, whose scale is fixed.

Source: Radford et al. 2021, "CLIP" (the scale); Gao et al. 2021, "GradCache" (the replay).
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from digits import flat, report
from documentation import cached_mnrl, minilm, pairs, pooled, tokenised
from pictures import curves, wanted
from torch import Tensor
from torch.nn import functional as F

from gradbox import GradClient, Gradient

BLOCK, SHARD_SIZE, SCALE, NUM_STEPS = "encoder.layer.5", 8, 20.0, 8


def ranking(queries: Tensor, passages: Tensor, log_scale: Tensor) -> Tensor:
    """Return the mean cross-entropy of telling each query's passage from all others."""
    scores_BB = F.normalize(queries, dim=1) @ F.normalize(passages, dim=1).T
    return F.cross_entropy(log_scale.exp() * scores_BB, torch.arange(scores_BB.shape[0]))


def main() -> None:
    picture, model = wanted(__doc__), minilm().eval()
    texts = dict(zip(("queries", "passages"), pairs(64), strict=True))
    inputs = {name: tokenised(side, shard_size=SHARD_SIZE) for name, side in texts.items()}
    block = {name: p for name, p in model.named_parameters() if name.startswith(BLOCK)}
    log_scale = torch.tensor(SCALE).log().requires_grad_()
    towers, scale = {"params": block.values(), "lr": 2e-5}, {"params": log_scale, "lr": 0.05}
    optimizer = torch.optim.Adam([towers, scale])
    losses, scales = [], []
    with GradClient() as client:
        for step in range(NUM_STEPS):
            job = Gradient(
                model="minilm",
                inputs=inputs,
                output="last_hidden_state",
                readout=pooled,
                loss=ranking,
                loss_inputs={"log_scale": log_scale},
                wrt=BLOCK,
                weights=block,
            )
            result = client.submit(job).result()
            losses.append(result.loss)
            scales.append(log_scale.exp().item())
            print(f"step {step}: loss {losses[-1]:.4f}, scale {scales[-1]:.2f}")
            optimizer.zero_grad()
            if step == 0:
                z = (torch.cat([pooled(model(**x)[0], x) for x in g]) for g in inputs.values())
                local = torch.autograd.grad(ranking(*z, log_scale), [*block.values(), log_scale])
                found = flat(result.grads[name] for name in (*block, "loss_inputs.log_scale"))
                report("the gradient", found, flat(local), within=1e-4)
                if find_spec("sentence_transformers"):
                    peer = cached_mnrl(texts.values(), scale=SCALE, shard_size=SHARD_SIZE)
                    theirs = flat(peer[name] for name in block)
                    report("that of the block", found[:-1], theirs, by="CachedMNRL", within=1e-4)
            result.apply_to(model)
            log_scale.grad = result.grads["loss_inputs.log_scale"][()]
            optimizer.step()
    curves(picture, {"loss": {"": losses}, "scale of similarities": {"": scales}})


if __name__ == "__main__":
    main()
