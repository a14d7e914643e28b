"""A loss that calls SciPy: outputs meet random targets by an optimal assignment.

    gradbox up --models examples/models.toml &
    python examples/assignment.py

No graph of tensor operations can hold `linear_sum_assignment`. By remote autograd the model runs on
the box, the loss runs here as ordinary Python, and `backward()` sends the cotangents back.

Source: Bojanowski and Joulin 2017, "Unsupervised learning by predicting noise" (the assignment).
"""

from __future__ import annotations

import torch
from digits import classifier, load, report, shards
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradbox import GradClient


def matched_distance(z_BD: Tensor, targets_BD: Tensor) -> Tensor:
    """Return the mean squared distance of each output to the target that it is assigned."""
    distances_BB = torch.cdist(z_BD, targets_BD).square()
    of, to = linear_sum_assignment(distances_BB.detach().numpy())
    return distances_BB[of, to].mean()


def main() -> None:
    x, _ = load(0, 150)
    model = classifier()
    numbers = torch.Generator().manual_seed(0)
    targets = torch.randn(len(x), 10, generator=numbers, dtype=torch.float64)

    matched_distance(model(x), targets).backward()
    with GradClient() as client:
        f = client.model("digits")
        loss = matched_distance(torch.cat([f(shard) for shard in shards(x)]), targets)
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            report(f"the gradient of {name}", f.grads[name], parameter.grad)
    print(f"matched distance {loss.item():.4f}")


if __name__ == "__main__":
    main()
