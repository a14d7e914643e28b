"""Barlow Twins: two noisy views of each digit, their features decorrelated over the whole batch.

    gradbox up --models examples/models.toml &
    python examples/barlow_twins.py

The loss is a module with a projector, batch norm over all samples included; it travels as a graph,
and its parameters are trained on the box along with the model's, as `loss.…`. The outputs of all
shards meet in one cross-correlation matrix, so no shard's loss can be had without the others.

Source: Zbontar et al. 2021, "Barlow Twins: self-supervised learning via redundancy reduction".
"""

from __future__ import annotations

import torch
from digits import classifier, flat, load, report, shards
from pictures import matrices, wanted
from torch import Tensor, nn

from gradbox import GradClient, Optimizer

REDUNDANCY, NUM_STEPS = 0.02, 40


class BarlowTwins(nn.Module):
    """Σ_i (1 − C_ii)² + λ Σ_{i≠j} C_ij², C the cross-correlation of the projected views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        self.projector = nn.Sequential(*layers).double()

    def correlation(self, first: Tensor, second: Tensor) -> Tensor:
        projected = self.projector(torch.cat([first, second]))
        a, b = projected[: first.shape[0]], projected[first.shape[0] :]
        a, b = ((p - p.mean(0)) / p.std(0, correction=0) for p in (a, b))
        return a.T @ b / first.shape[0]

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        C = self.correlation(first, second)
        missing = (C - torch.eye(16, dtype=C.dtype)).square()
        return missing.diagonal().sum() + REDUNDANCY * (missing.sum() - missing.diagonal().sum())


def main() -> None:
    picture, (x, _) = wanted(__doc__), load(0, 300)
    model, loss = classifier(), BarlowTwins()
    torch.manual_seed(2)
    views = {name: x + 0.1 * torch.randn_like(x) for name in ("first", "second")}
    parameters = dict(model.named_parameters())
    parameters |= {f"loss.{name}": p for name, p in loss.named_parameters()}
    before = loss.correlation(*map(model, views.values()))
    local = torch.autograd.grad(loss(*map(model, views.values())), [*parameters.values()])
    with GradClient() as client:
        run = client.train("digits", optimizer=Optimizer("adam", lr=0.01))
        for _ in range(NUM_STEPS):
            step = run.step(
                inputs={name: shards(view) for name, view in views.items()},
                loss=loss,
                returns=("grads",) if run.num_steps == 0 else (),
            )
            if step.number == 1:
                report("the gradient", flat(step.grads[n] for n in parameters), flat(local))
            if step.number % 10 == 0:
                print(f"step {step.number}: loss {step.loss:.3f}")
        trained = run.weights()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    after = loss.correlation(*map(model, views.values()))
    matrices(picture, {"before": before, f"after {NUM_STEPS} steps": after}, symmetric=True)


if __name__ == "__main__":
    main()
