"""Which training digits does a classifier owe its test errors to? An influence function.

    gradbox up --models examples/models.toml &
    python examples/influence.py

A store keeps the rows G of training gradients, and F = GᵀG/n as its "kernel". With damping λ, the
influence of training sample b on the loss of test sample c is g_cᵀ (F + λ)⁻¹ g_b.

Source: Koh and Liang 2017, "Understanding black-box predictions via influence functions".
"""

from __future__ import annotations

import torch
from digits import cross_entropy, load, report, rows, shards, trained_there
from pictures import digits, wanted

from gradbox import GradClient

DAMPING = 0.01


def main() -> None:
    picture = wanted(__doc__)
    (x, labels), (test_x, test_labels) = load(0, 300), load(300, 340)
    train = {"inputs": shards(x), "loss": cross_entropy, "loss_inputs": {"labels": labels}}
    test = {"inputs": shards(test_x), "loss": cross_entropy, "loss_inputs": {"labels": test_labels}}
    with GradClient() as client:
        run, model = trained_there(client, x, labels)
        store = client.store(f"influence-{run.id}", model="digits", weights=run, dtype="fp32")
        store.add(**train, ids=range(len(x)))
        store.fit("kernel", damping=DAMPING)
        hits = store.query(**test, top=3, bottom=1, precondition="kernel")
        store.delete()

    G = rows(model, cross_entropy(model(x), labels))
    test_G = rows(model, cross_entropy(model(test_x), test_labels))
    fisher = G.T @ G / len(G) + DAMPING * torch.eye(G.shape[1], dtype=torch.float64)
    exact = test_G @ torch.linalg.solve(fisher, G.T)
    report("the influence", hits.scores, exact.gather(1, hits.rows), within=1e-3)

    drawn = []
    for c in hits.losses.topk(3).indices:
        *best, worst = hits.ids[c]
        print(
            f"test digit {c}, a {test_labels[c]} with loss {hits.losses[c]:.2f}: helped most by "
            f"training digit {best[0]} (a {labels[best[0]]}), harmed by {worst} (a {labels[worst]})"
        )
        shown = [(f"test: a {test_labels[c]}", test_x[c])]
        shown += [(f"helped by a {labels[b]}", x[b]) for b in best]
        drawn.append([*shown, (f"harmed by a {labels[worst]}", x[worst])])
    digits(picture, drawn)


if __name__ == "__main__":
    main()
