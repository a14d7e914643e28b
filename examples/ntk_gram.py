"""The empirical neural tangent kernel of a classifier, and kernel regression with it.

    gradbox up --models examples/models.toml &
    python examples/ntk_gram.py

Θ(x, x') = Σ_y J_y(x) J_y(x')ᵀ comes from the box as numbers between samples: the Jacobian, ten rows
a sample, stays there as factors, and the test digits' rows are multiplied with it.

Source: Jacot, Gabriel and Hongler 2018, "Neural tangent kernel".
"""

from __future__ import annotations

from typing import Any

import torch
from digits import classifier, load, report, rows, shards
from pictures import matrices, wanted
from torch import Tensor
from torch.nn import functional as F

from gradbox import GradClient, Jacobian

RIDGE = 1e-3


def main() -> None:
    picture = wanted(__doc__)
    (x, labels), (test_x, test_labels) = load(0, 100), load(100, 150)
    model = classifier()

    def job(pixels: Tensor, **how: Any) -> Jacobian:
        return Jacobian(model="digits", inputs=shards(pixels), **how)

    with GradClient() as client:
        train = client.submit(job(x, form="factored"))
        kernel = client.submit(job(x, reduce="gram_trace")).result().gram_trace()
        train.wait()
        across = client.submit(job(test_x, reduce="gram_trace", against=train))
        cross = across.result().gram_trace()

    J, test_J = (
        rows(model, model(pixels).flatten()).view(len(pixels), -1) for pixels in (x, test_x)
    )
    report("the kernel of the training digits", kernel, J @ J.T)
    report("that of the test digits with them", cross, test_J @ J.T)

    ridge = RIDGE * kernel.diagonal().mean() * torch.eye(len(x)).double()
    targets = F.one_hot(labels, 10).double() - 0.1
    predicted = cross @ torch.linalg.solve(kernel + ridge, targets)
    accuracy = (predicted.argmax(1) == test_labels).double().mean()
    print(f"kernel regression by it gets {accuracy:.0%} of {len(test_x)} unseen digits right")
    by_label = labels.argsort(stable=True)[::2]
    matrices(
        picture,
        {
            "kernel, every other training digit": kernel[by_label][:, by_label],
            "predicted, test digit × class": predicted[test_labels.argsort(stable=True)],
        },
    )


if __name__ == "__main__":
    main()
