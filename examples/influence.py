"""Which training digits does a classifier owe its test errors to? An influence function.

    gradbox up --models examples/models.toml &
    python examples/influence.py

With the rows G of training gradients and the damped empirical Fisher F = GᵀG/n + λ, the influence
of training sample b on the loss of test sample c is g_cᵀ F⁻¹ g_b. By Woodbury's identity it needs
inner products alone: K = G Gᵀ, and the test rows' with G by `against`; no gradient is sent.

Source: Koh and Liang 2017, "Understanding black-box predictions via influence functions".
"""

from __future__ import annotations

from typing import Any

import torch
from digits import cross_entropy, load, report, rows, shards, trained
from pictures import digits, wanted
from torch import Tensor

from gradbox import GradClient, PerSampleGradient

DAMPING = 0.01


def influence(train_gram_BB: Tensor, cross_CB: Tensor) -> Tensor:
    """Return g_cᵀ (GᵀG/n + λ)⁻¹ g_b of all test samples c and training samples b, (C, B)."""
    n = len(train_gram_BB)
    inner = torch.linalg.inv(train_gram_BB + n * DAMPING * torch.eye(n, dtype=torch.float64))
    return (cross_CB - cross_CB @ inner @ train_gram_BB) / DAMPING


def main() -> None:
    picture = wanted(__doc__)
    (x, labels), (test_x, test_labels) = load(0, 300), load(300, 340)
    model = trained(x, labels)

    def products(inputs: Any, of: Any, **how: Any) -> Any:
        job = PerSampleGradient(
            model="digits",
            inputs=inputs,
            loss=cross_entropy,
            loss_inputs={"labels": of},
            weights=model.state_dict(),
            reduce="gram",
            **how,
        )
        return client.submit(job).result().gram()

    with GradClient() as client:
        gram = products(shards(x), labels)
        cross = products(
            {"test": shards(test_x), "train": shards(x)},
            {"test": test_labels, "train": labels},
            against="train",
        )
    found = influence(gram, cross)

    G = rows(model, cross_entropy(model(x), labels))
    test_G = rows(model, cross_entropy(model(test_x), test_labels))
    fisher = G.T @ G / len(G) + DAMPING * torch.eye(G.shape[1], dtype=torch.float64)
    report("the influence", found, test_G @ torch.linalg.solve(fisher, G.T))

    errors = cross_entropy(model(test_x), test_labels)
    drawn = []
    for c in errors.topk(3).indices:
        best, worst = found[c].argsort(descending=True)[:3], found[c].argmin()
        print(
            f"test digit {c}, a {test_labels[c]} with loss {errors[c]:.2f}: helped most by "
            f"training digit {best[0]} (a {labels[best[0]]}), harmed by {worst} (a {labels[worst]})"
        )
        shown = [(f"test: a {test_labels[c]}", test_x[c])]
        shown += [(f"helped by a {labels[b]}", x[b]) for b in best]
        drawn.append([*shown, (f"harmed by a {labels[worst]}", x[worst])])
    digits(picture, drawn)


if __name__ == "__main__":
    main()
