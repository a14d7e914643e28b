"""Two models small enough to retrain by the hundred: a classifier of digits, and a regression.

Two more are not trained, and measure how fast rows are made: a wider classifier, and a transformer.

Each minimises mean loss + decay/2 ‖θ‖² on its training samples by Adam on all of them at once. So
influence has its natural damping: decay, the penalty's second derivative. The Hessian takes three
of it: one makes it positive definite at a minimum, which training comes near but not to.

Suffixes: S models that are trained side by side, N training samples, Q queries, D features.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from gradbox_worker.demo.text import documentation_pairs

Stacked = dict[str, Tensor]  # name → (S, *shape)
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs, targets → (B,)

RATE: Final = 0.01
SEED: Final = 0
DRAWS: Final = 4
SKETCHES: Final = 24
HESSIAN_DAMPING: Final = 3  # of the decay
NUM_TEXTS, TEXT_BYTES = 400, 64
SKETCH_DIM: Final = 512  # of rows that are timed


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to be trained, and the samples.

    Attributes:
        x: of N training samples, (N, D); y are their targets, (N,).
        query_x: of Q queries, (Q, D); query_y likewise.
        widths: of its layers, as `builder` takes them.
        loss: of each sample.
        output: f, the number of each sample that TRAK calls the model's output.
        slope: dloss/df of each sample, from f and its target.
        draw: targets from the distribution that a model's outputs name.
        steps: of Adam.
        sketch_dim: of rows that are projected for TRAK, `SKETCHES` times with other signs.
        kernel_damping: added to each kernel, the mean product of such rows.
        wrt: globs over the parameters that rows are of; None for all.
    """

    name: str
    widths: tuple[int, ...]
    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor
    loss: Loss
    output: Loss
    slope: Loss
    draw: Callable[[Tensor, torch.Generator], Tensor]
    decay: float
    steps: int
    sketch_dim: int
    kernel_damping: float
    builder: Callable[[tuple[int, ...]], nn.Module] = mlp
    wrt: tuple[str, ...] | None = None

    @property
    def hessian_damping(self) -> float:
        """What makes the Hessian positive definite."""
        return HESSIAN_DAMPING * self.decay

    def model(self, weights: Path | None = None) -> nn.Module:
        """Return the model, with weights of a file or with random ones."""
        found = self.builder(self.widths)
        if weights is not None:
            found.load_state_dict(load_file(weights))
        return found.eval()

    def fisher_samples(self, weights: Path) -> tuple[Tensor, Tensor]:
        """Return the training samples `DRAWS` times over, with targets that the model draws.

        The Fisher is the mean of squared gradients over such targets. With the given ones it is
        the empirical Fisher, which vanishes where a model fits them.
        """
        x_BD = self.x.repeat(DRAWS, 1)
        with torch.no_grad():
            z = self.model(weights)(x_BD)
        return x_BD, self.draw(z, torch.Generator().manual_seed(SEED))

    def entry(self, weights: Path) -> str:
        """Write trained weights; return the model's entry in a models file."""
        subset = torch.arange(len(self.x)).unsqueeze(0)
        save_file({name: p[0] for name, p in train(self, subset, seed=SEED).items()}, weights)
        return "\n".join(
            [
                f"[models.{self.name}]",
                'builder = "python"',
                f'source = "{__name__}:{self.builder.__name__}"',
                f"kwargs = {{ widths = {list(self.widths)} }}",
                f"weights = {json.dumps(str(weights))}",
                "",
            ]
        )


class Encoder(nn.Module):
    """A transformer over bytes of texts, whose output is the mean over positions."""

    def __init__(self, width: int, inner: int, num_classes: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TEXT_BYTES,
        )
        self.layers = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x_BT: Tensor) -> Tensor:
        positions: Tensor = self.head(self.layers(x_BT).last_hidden_state)
        return positions.mean(1)


def encoder(widths: tuple[int, ...]) -> Encoder:
    """Return a transformer of some width, with feed-forward layers and classes of others."""
    width, inner, num_classes = widths
    return Encoder(width, inner, num_classes)


def train(task: Task, subsets_SM: Tensor, *, seed: int) -> Stacked:
    """Train a model on each of S subsets of the training samples, all from one initialisation.

    Adam acts on each number by itself, so the models don't meet though one optimizer has them all.
    """
    torch.manual_seed(seed)
    model = task.builder(task.widths)
    stacked = {
        name: p.detach().expand(len(subsets_SM), *p.shape).clone().requires_grad_()
        for name, p in model.named_parameters()
    }
    forward = vmap(partial(functional_call, model))
    x_SMD, y_SM = task.x[subsets_SM], task.y[subsets_SM]
    optimizer = torch.optim.Adam(list(stacked.values()), lr=RATE, weight_decay=task.decay)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=task.steps
    )
    for _ in range(task.steps):
        optimizer.zero_grad()
        z = forward(stacked, (x_SMD,))
        losses = task.loss(z.flatten(0, 1), y_SM.flatten())
        (losses.sum() / y_SM.shape[1]).backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in stacked.items()}


def cross_entropy(z: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(z, targets, reduction="none")


def margin(z: Tensor, targets: Tensor) -> Tensor:
    """Return log p/(1 − p) of each sample's class, TRAK's output of a classifier."""
    at = targets.unsqueeze(1)
    return z.gather(1, at).squeeze(1) - z.scatter(1, at, -torch.inf).logsumexp(1)


def half_square(z: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared error of each sample."""
    return (z.squeeze(1) - targets).square() / 2


def prediction(z: Tensor, targets: Tensor) -> Tensor:
    """Return the output of each sample, which is a number already."""
    return z.squeeze(1)


def _drawn_class(z: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(z.softmax(1), 1, generator=generator).squeeze(1)


def _drawn_number(z: Tensor, generator: torch.Generator) -> Tensor:
    return z.squeeze(1) + torch.randn(len(z), generator=generator)


def digits() -> Task:
    """Scikit-learn's digits: 1,200 of them to train on, and 100 queries."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _split(
        torch.tensor(x, dtype=torch.float32) / 16,
        torch.tensor(y),
        num=1200,
        name="digits",
        widths=(64, 32, 10),
        loss=cross_entropy,
        output=margin,
        slope=lambda f, _: -torch.sigmoid(-f),
        draw=_drawn_class,
        decay=1e-3,
        steps=500,
        sketch_dim=1024,
        kernel_damping=0.1,
    )


def diabetes() -> Task:
    """Scikit-learn's diabetes, scaled to unit variance: 342 to train on, and 100 queries."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x_BD, y_B = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    return _split(
        x_BD / x_BD.std(0),
        (y_B - y_B.mean()) / y_B.std(),
        num=342,
        name="diabetes",
        widths=(10, 16, 1),
        loss=half_square,
        output=prediction,
        slope=lambda f, y: f - y,
        draw=_drawn_number,
        decay=1e-2,
        steps=500,
        sketch_dim=256,
        kernel_damping=0.01,
    )


def wide() -> Task:
    """The digits ten times over, and a wider model that is not trained: to measure rows by."""
    task = digits()
    return replace(
        task,
        name="wide",
        widths=(64, 128, 128, 10),
        x=task.x.repeat(10, 1),
        y=task.y.repeat(10),
        steps=0,
        sketch_dim=SKETCH_DIM,
    )


def texts() -> Task:
    """The first bytes of Python's documentation strings, of ten classes, and a transformer."""
    found = [f"{query} {passage}".encode() for query, passage in documentation_pairs(NUM_TEXTS)]
    x = torch.tensor([list(text[:TEXT_BYTES].ljust(TEXT_BYTES)) for text in found])
    return replace(
        digits(),
        name="texts",
        builder=encoder,
        widths=(256, 1024, 10),
        wrt=("*.self.*", "*.dense.*", "head.*"),  # linear layers
        x=x,
        y=torch.arange(NUM_TEXTS) % 10,
        steps=0,
    )


def _split(x: Tensor, y: Tensor, *, num: int, **settings: Any) -> Task:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    train, queries = order[:num], order[num : num + 100]
    return Task(x=x[train], y=y[train], query_x=x[queries], query_y=y[queries], **settings)


TASKS: Final[dict[str, Callable[[], Task]]] = {
    "digits": digits,
    "diabetes": diabetes,
    "wide": wide,
    "texts": texts,
}
