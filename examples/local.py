"""Attributes digits to digits without a box: the same program, on a module of this process.

    python examples/local.py

`GradClient.local` takes live modules by name and computes here, with the code of a box: it is how
one tries a loss before a job is sent, looks into a model that fails, or uses one's own GPU. With
`GradClient()` in its place, and `weights=model.state_dict()`, the job goes to a box. Here are the
products of 1,800 training digits' gradients with 200 others', by gradbox and by vmap, and a step of
training in between, which the next job sees.
"""

from __future__ import annotations

import torch
from digits import cross_entropy, load, report, shards, trained
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from gradbox import GradClient, Gradient, PerSampleGradient

NUM_TEST = 200


def by_vmap(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of every sample's loss, (B, P)."""

    def loss(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), label[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, pixels, labels)
    return torch.cat([row.flatten(1) for row in found.values()], 1)


def main() -> None:
    pixels, labels = load(0, 1797)
    test, train = (pixels[:NUM_TEST], labels[:NUM_TEST]), (pixels, labels)
    model = trained(*train, num_steps=20)
    client = GradClient.local({"mine": model})

    def products() -> Tensor:
        job = PerSampleGradient(
            model="mine",
            inputs={"test": shards(test[0]), "train": shards(train[0])},
            loss=cross_entropy,
            loss_inputs={"labels": {"test": test[1], "train": train[1]}},
            reduce="gram",
            against="train",
        )
        found: Tensor = client.run(job).gram()
        return found

    def exact() -> Tensor:
        return by_vmap(model, *test) @ by_vmap(model, *train).T

    report("products of all pairs", products(), exact(), by="vmap")
    step = client.run(
        Gradient(
            model="mine",
            inputs=shards(pixels),
            loss=F.cross_entropy,
            loss_inputs={"target": labels},
        )
    )
    step.apply_to(model)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    report("products after a step of training", products(), exact(), by="vmap")


if __name__ == "__main__":
    main()
