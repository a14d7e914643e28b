"""Attributes test digits to training digits by projected gradients, as TRAK does.

    gradbox up --models examples/models.toml &
    python examples/trak.py

A store keeps DIM numbers of each training gradient, projected by random signs, as features Φ, and
ΦᵀΦ/n as its "kernel". Test sample c's scores are φ_cᵀ (ΦᵀΦ/n + λ)⁻¹ Φᵀ. They are compared with
those of projections made here, and of whole gradients.

Source: Park et al. 2023, "TRAK: attributing model behavior at scale", one model in place of many.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import cross_entropy, load, report, rows, shards, trained_there
from pictures import points, wanted
from torch import Tensor, nn

from gradbox import GradClient, Rademacher
from gradbox_factors import Block, Factored

DIM = 512
SEED = 1
DAMPING = 1 / 300


def scores(features_BK: Tensor, test_CK: Tensor) -> Tensor:
    """Return the score of each training sample for each test sample, (C, B)."""
    B, K = features_BK.shape
    kernel = features_BK.T @ features_BK / B + DAMPING * torch.eye(K, dtype=torch.float64)
    return test_CK @ torch.linalg.solve(kernel, features_BK.T)


def projected_here(model: nn.Module, rows_BP: Tensor) -> Tensor:
    """Project rows of local autograd by the matrix that the seed names."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parts = rows_BP.split([shape.numel() for shape in shapes.values()], dim=1)
    piece: Any = {
        name: Block(name, tuple(shape), part.reshape(-1, 1, *shape))
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
    return Factored([piece]).projection(DIM, SEED, kind="rademacher")[:, 0]


def main() -> None:
    picture = wanted(__doc__)
    (x, labels), (test_x, test_labels) = load(0, 300), load(300, 340)
    train = {"inputs": shards(x), "loss": cross_entropy, "loss_inputs": {"labels": labels}}
    test = {"inputs": shards(test_x), "loss": cross_entropy, "loss_inputs": {"labels": test_labels}}
    with GradClient() as client:
        run, model = trained_there(client, x, labels)
        how = {"weights": run, "projection": Rademacher(DIM), "seed": SEED, "dtype": "fp32"}
        store = client.store(f"trak-{run.id}", model="digits", **how)
        added = store.add(**train, ids=range(len(x)))
        store.fit("kernel", damping=DAMPING)
        found = store.scores(**test, precondition="kernel")[:]
        store.delete()

    G = rows(model, cross_entropy(model(x), labels))
    test_G = rows(model, cross_entropy(model(test_x), test_labels))
    here = scores(projected_here(model, G), projected_here(model, test_G))
    report("scores", found, here, within=1e-3)
    exact = scores(G, test_G)
    correlation = torch.corrcoef(torch.stack([found.flatten(), exact.flatten()]))[0, 1]
    print(f"{G.shape[1]} numbers in {DIM}: correlation {correlation:.3f} with exact scores")
    print(f"bound on the error of an inner product: {added.manifest.projection_error:.3f}")
    points(picture, exact, found, labels=("exact score", f"from {DIM} numbers"), title="TRAK")


if __name__ == "__main__":
    main()
