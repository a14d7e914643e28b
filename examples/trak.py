"""Attributes test digits to training digits by projected gradients, as TRAK does.

    gradbox up --models examples/models.toml &
    python examples/trak.py

Each sample's gradient is projected on the box to a few numbers by random signs; what comes back is
(B, DIM) instead of (B, P). With the features Φ of the training digits, test sample c's scores are
φ_cᵀ (ΦᵀΦ + λ)⁻¹ Φᵀ; they are compared with those of projections made here, and of whole gradients.

Source: Park et al. 2023, "TRAK: attributing model behavior at scale", one model in place of many.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import cross_entropy, load, report, rows, shards, trained
from pictures import points, wanted
from torch import Tensor, nn

from gradbox import GradClient, PerSampleGradient
from gradbox_factors import Block, Factored

DIM = 512
SEED = 1
RIDGE = 1.0


def scores(features_BK: Tensor, test_CK: Tensor) -> Tensor:
    """Return the score of each training sample for each test sample, (C, B)."""
    kernel = features_BK.T @ features_BK + RIDGE * torch.eye(features_BK.shape[1]).double()
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
    sets = load(0, 300), load(300, 340)
    model = trained(*sets[0])
    with GradClient() as client:
        train, test = (
            client.submit(
                PerSampleGradient(
                    model="digits",
                    inputs=shards(pixels),
                    loss=cross_entropy,
                    loss_inputs={"labels": of},
                    weights=model.state_dict(),
                    reduce="projection",
                    dim=DIM,
                    kind="rademacher",
                    seed=SEED,
                )
            ).result()
            for pixels, of in sets
        )
    found = scores(train.projection(), test.projection())
    G, test_G = (rows(model, cross_entropy(model(pixels), of)) for pixels, of in sets)
    report("scores", found, scores(projected_here(model, G), projected_here(model, test_G)))
    exact = scores(G, test_G)
    correlation = torch.corrcoef(torch.stack([found.flatten(), exact.flatten()]))[0, 1]
    print(f"{G.shape[1]} numbers in {DIM}: correlation {correlation:.3f} with exact scores")
    print(f"bound on the error of an inner product: {train.manifest.projection_error:.3f}")
    points(picture, exact, found, labels=("exact score", f"from {DIM} numbers"), title="TRAK")


if __name__ == "__main__":
    main()
