"""Models of half subsets, and how well scores predict them: the linear datamodeling score.

LDS of a query: Spearman's correlation, over subsets, of the sum of the scores of a subset's samples
with what the models that were trained on it do to the query, here its loss with the sign turned. A
score is the fall in the query's loss that a training sample brings, so both grow together.

Source: Park et al. 2023, "TRAK: attributing model behavior at scale", section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from benchmarks.attribution.tasks import Task, mlp, train

SUBSETS: Final = 64
SEEDS: Final = 5


@dataclass(frozen=True)
class Retrained:
    """Subsets of half the samples, as (S, N/2) indices, and losses (S, Q) of models of these.

    Losses are means over initialisations, none of which is the scored model's.
    """

    subsets: Tensor
    losses: Tensor

    def lds(self, scores_QN: Tensor) -> float:
        """Return the mean over queries of the linear datamodeling score."""
        sums_QS = scores_QN.double()[:, self.subsets].sum(2)
        return float(spearman(sums_QS, -self.losses.T).mean())


def retrain(task: Task, *, num_subsets: int = SUBSETS, num_seeds: int = SEEDS) -> Retrained:
    """Train a model on each subset from each initialisation."""
    num = len(task.x)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(num, generator=generator) for _ in range(num_subsets)]
    subsets_SM = torch.stack(orders)[:, : num // 2]
    forward = vmap(partial(functional_call, mlp(task.widths)), in_dims=(0, None))
    losses_SQ = torch.zeros(num_subsets, len(task.query_x), dtype=torch.float64)
    for seed in range(1, num_seeds + 1):
        z_SQY = forward(train(task, subsets_SM, seed=seed), (task.query_x,))
        losses = task.loss(z_SQY.flatten(0, 1), task.query_y.repeat(num_subsets))
        losses_SQ += losses.reshape(losses_SQ.shape) / num_seeds
    return Retrained(subsets_SM, losses_SQ)


def spearman(left: Tensor, right: Tensor) -> Tensor:
    """Return Spearman's correlation of each row with the same row of the other matrix."""
    from scipy.stats import rankdata

    ranks = [torch.tensor(rankdata(np.asarray(one), axis=1)) for one in (left, right)]
    a, b = ((one - one.mean(1, keepdim=True)) for one in ranks)
    return torch.cosine_similarity(a, b, dim=1)
