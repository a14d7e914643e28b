"""DP-SGD: the box sums clipped gradients, the noise that makes it private is added here.

    gradbox up --models examples/models.toml &
    python examples/dp_sgd.py

No sample's gradient comes over the wire, nor is it ever formed on the box: the norms come from
factors, and the sum is one backward pass more.

Source: Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1.
"""

from __future__ import annotations

import torch
from digits import classifier, cross_entropy, flat, load, report, rows, shards
from pictures import curves, wanted
from torch.nn import functional as F

from gradbox import GradClient, PerSampleGradient

CLIP = 3.0
NOISE = 0.5  # standard deviation of the noise, in units of CLIP
LEARNING_RATE = 1.0
NUM_STEPS = 20


def main() -> None:
    picture = wanted(__doc__)
    x, labels = load(0, 400)
    losses, shares = [], []
    model = classifier()
    noise = torch.Generator().manual_seed(0)
    with GradClient() as client:
        for step in range(NUM_STEPS):
            job = PerSampleGradient(
                model="digits",
                inputs=shards(x),
                loss=cross_entropy,
                loss_inputs={"labels": labels},
                weights=model.state_dict(),
                reduce="clipped_sum",
                clip=CLIP,
            )
            result = client.submit(job).result()
            if step == 0:
                G = rows(model, cross_entropy(model(x), labels))
                clipped = G * (CLIP / G.norm(dim=1).clamp_min(CLIP))[:, None]
                found = flat(result.grads[name] for name in result.names)
                report("the clipped sum", found, clipped.sum(0))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    drawn = torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
                    noisy = result.grads[name][()] + NOISE * CLIP * drawn
                    parameter -= LEARNING_RATE * noisy / len(x)
            loss = F.cross_entropy(model(x), labels).item()
            share = (result.norms() > CLIP).double().mean().item()
            losses.append(loss)
            shares.append(share)
            print(f"step {step}: loss {loss:.3f}, {share:.0%} of the gradients clipped")
    curves(picture, {"loss": {"": losses}, "share of gradients clipped": {"": shares}})


if __name__ == "__main__":
    main()
