"""A critic with a gradient penalty through a frozen generator: mixed second derivatives.

    gradbox up --models examples/models.toml &
    python examples/wgan_gp.py

The critic is to have slope 1 by the *latents*: t = mean((‖∂critic(G(z))/∂z‖ − 1)²). The gradient of
t goes twice through the generator G, which is on the box; the rest is ordinary autograd.

Source: Gulrajani et al. 2017, "Improved training of Wasserstein GANs", equation 3.
"""

from __future__ import annotations

import torch
from digits import decoder, flat, load, report, shards
from pictures import curves, wanted
from torch import Tensor, nn

from gradbox import Forward, GradClient, MixedGradient

PENALTY, NUM_STEPS = 10.0, 25


class Score(nn.Module):
    """The critic's score, summed over samples: one sample's slope does not depend on another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)).double()

    def forward(self, v: Tensor) -> Tensor:
        return self.critic(v).sum()


def penalty(slope_BD: Tensor) -> Tensor:
    return (slope_BD.norm(dim=1) - 1).square().mean()


def generator(real: Tensor) -> tuple[nn.Module, Tensor]:
    """Return a generator trained here as a decoder of digits, and the latents of these."""
    model, latents = decoder(), (real - real.mean(0)) @ torch.pca_lowrank(real, 8, niter=8)[2]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        (model(latents) - real).square().sum(1).mean().backward()
        optimizer.step()
    return model, latents


def main() -> None:
    picture, (real, _) = wanted(__doc__), load(0, 200)
    G, latents = generator(real)
    z = latents.flip(0) + 0.3 * torch.randn(latents.shape).double()
    given = {"model": "decoder", "inputs": shards(z), "weights": G.state_dict()}
    score, distances, penalties = Score(), [], []
    optimizer = torch.optim.Adam(score.parameters(), lr=0.01, betas=(0.5, 0.9))
    with GradClient() as client:
        fake = client.submit(Forward(**given)).result().outputs["z"]
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            distance = score.critic(real).mean() - score.critic(fake).mean()
            result = client.submit(MixedGradient(inner=score, outer=penalty, **given)).result()
            if step == 0:
                leaf = z.clone().requires_grad_()
                slope = torch.autograd.grad(score(G(leaf)), leaf, create_graph=True)[0]
                moved = dict(list(score.named_parameters())[:3])  # the last bias has no slope
                local = torch.autograd.grad(penalty(slope), [*moved.values()])
                report("∂t/∂critic", flat(result.grads[f"inner.{n}"] for n in moved), flat(local))
            (-distance / PENALTY).backward()
            result.apply_to(score, prefix="inner.")
            optimizer.step()
            distances.append(distance.item())
            penalties.append(result.loss)
    print(f"distance {distances[-1]:.3f}, penalty {penalties[0]:.3f} → {penalties[-1]:.3f}")
    curves(picture, {"critic: real − generated": {"": distances}, "penalty": {"": penalties}})


if __name__ == "__main__":
    main()
