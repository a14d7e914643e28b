"""Which training digits does a classifier owe its test errors to? An influence function.

    gradbox up --models examples/models.toml &
    python examples/influence.py

With the rows G of training gradients and the damped empirical Fisher F = GᵀG/n + λ, the influence
of training sample b on the loss of test sample c is g_cᵀ F⁻¹ g_b. By Woodbury's identity it needs
inner products alone: K = G Gᵀ, and the test rows' with G. The box keeps the training rows as
factors and multiplies the test rows with them (`against`); no gradient comes over the wire.

Source: Koh and Liang 2017, "Understanding black-box predictions via influence functions".
"""

from __future__ import annotations

from typing import Any

import torch
from digits import cross_entropy, load, report, rows, shards, trained
from torch import Tensor

from gradbox import GradClient, PerSampleGradient

DAMPING = 0.01


def influence(train_gram_BB: Tensor, cross_CB: Tensor) -> Tensor:
    """Return g_cᵀ (GᵀG/n + λ)⁻¹ g_b of all test samples c and training samples b, (C, B)."""
    n = len(train_gram_BB)
    inner = torch.linalg.inv(train_gram_BB + n * DAMPING * torch.eye(n, dtype=torch.float64))
    return (cross_CB - cross_CB @ inner @ train_gram_BB) / DAMPING


def main() -> None:
    (x, labels), (test_x, test_labels) = load(0, 300), load(300, 340)
    model = trained(x, labels)

    def job(pixels: Tensor, of: Tensor, **how: Any) -> PerSampleGradient:
        return PerSampleGradient(
            model="digits",
            inputs=shards(pixels),
            loss=cross_entropy,
            loss_inputs={"labels": of},
            weights=model.state_dict(),
            **how,
        )

    with GradClient() as client:
        train = client.submit(job(x, labels, form="factored"))
        gram = client.submit(job(x, labels, reduce="gram")).result().gram()
        train.wait()
        cross = client.submit(job(test_x, test_labels, reduce="gram", against=train))
        found = influence(gram, cross.result().gram())

    G = rows(model, cross_entropy(model(x), labels))
    test_G = rows(model, cross_entropy(model(test_x), test_labels))
    fisher = G.T @ G / len(G) + DAMPING * torch.eye(G.shape[1], dtype=torch.float64)
    report("the influence", found, test_G @ torch.linalg.solve(fisher, G.T))

    errors = cross_entropy(model(test_x), test_labels)
    for c in errors.topk(3).indices:
        helpful, harmful = found[c].argmax(), found[c].argmin()
        print(
            f"test digit {c}, a {test_labels[c]} with loss {errors[c]:.2f}: helped most by "
            f"training digit {helpful} (a {labels[helpful]}), harmed by {harmful} "
            f"(a {labels[harmful]})"
        )


if __name__ == "__main__":
    main()
