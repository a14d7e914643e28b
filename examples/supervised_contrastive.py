"""A supervised-contrastive loss over more samples than one graph holds, with a learned temperature.

    gradbox up --models examples/models.toml &
    python examples/supervised_contrastive.py

The loss couples all samples: each is drawn to all others of its label. It travels as a graph; the
temperature is a parameter of the loss and its gradient comes back as `loss.log_temperature`.

Source: Khosla et al. 2020, "Supervised contrastive learning", equation 2.
"""

from __future__ import annotations

import torch
from digits import classifier, load, report, shards
from pictures import curves, wanted
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import GradClient, Gradient


class SupCon(nn.Module):
    """Mean over samples of −Σ_positives log-softmax of similarities / number of positives."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        z_BD = F.normalize(z, dim=1)
        others = 1 - torch.eye(z.shape[0], dtype=z.dtype)
        logits_BB = z_BD @ z_BD.T * torch.exp(-self.log_temperature) - 1e9 * (1 - others)
        positives = (labels[:, None] == labels).to(z.dtype) * others
        log_probability = logits_BB.log_softmax(1)
        return -((log_probability * positives).sum(1) / positives.sum(1)).mean()


def main() -> None:
    picture = wanted(__doc__)
    x, labels = load(0, 300)
    losses: list[float] = []
    temperatures: list[float] = []
    model, loss = classifier(), SupCon()
    with GradClient() as client:
        for step in range(20):
            weights = model.state_dict()
            job = Gradient(
                model="digits",
                inputs=shards(x),
                loss=loss,
                loss_inputs={"labels": labels},
                weights=weights,
                retain=0,
            )
            result = client.submit(job).result()
            named = dict(model.named_parameters()) | {"loss.log_temperature": loss.log_temperature}
            if step == 0:
                local = torch.autograd.grad(loss(model(x), labels), list(named.values()))
                for name, expected in zip(named, local, strict=True):
                    report(f"the gradient of {name}", result.grads[name][()], expected)
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter -= 0.05 * result.grads[name][()]
            losses.append(result.loss)
            temperatures.append(float(loss.log_temperature.exp()))
            print(f"step {step}: loss {result.loss:.4f}")
    curves(picture, {"loss": {"": losses}, "temperature": {"": temperatures}})


if __name__ == "__main__":
    main()
