"""Shards that are one sample each, of which no part can be taken: graphs with their edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import ModelCallFailed
from gradbox_engine.errors import NoBatchAxis
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive


class _Graph(nn.Module):
    """Two rounds of messages along edges (2, E) between nodes (N, 4)."""

    def __init__(self, *, pooled: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        self.drop = nn.Dropout(0.2)
        self.pooled = pooled

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.drop(self._sent(self.first(nodes), edges).tanh())
        h = self._sent(self.second(h), edges)
        return h.mean(0, keepdim=True) if self.pooled else h

    def _sent(self, h: Tensor, edges: Tensor) -> Tensor:
        return h.index_add(0, edges[1], h[edges[0]])


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    edges = {5: [(0, 4), (4, 2), (3, 1)], 3: [(2, 0), (1, 2)], 6: [(5, 0), (3, 4)]}
    return [
        moved(
            {
                "nodes": torch.randn(n, 4, generator=generator, dtype=torch.float64),
                "edges": torch.tensor(pairs).T,
            }
        )
        for n, pairs in edges.items()
    ]


def _model(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return _Graph(**settings).double().to(DEVICE)


def _expected() -> Tensor:
    found = [naive.jacobian(_model().eval(), shard) for shard in _shards()]
    return torch.cat([naive.flat(rows) for rows in found])


def test_rows_of_graphs_are_reduced() -> None:
    def loss(z: Tensor, target: Tensor) -> Tensor:
        return (z * target).sum(1)

    target = torch.randn(3, 2, dtype=torch.float64, device=DEVICE)
    rows = torch.einsum("by,byp->bp", target, _expected())
    found = per_sample_gradient(
        _model(), _shards(), loss, loss_inputs={"target": target}, reduce="gram"
    )
    assert naive.difference(found.arrays["gram"], rows @ rows.T) <= naive.TOLERANCE


def test_rows_of_the_nodes_of_a_graph_are_refused() -> None:
    with pytest.raises(NoBatchAxis, match="let each shard be one sample"):
        jacobian(_model(pooled=False), _shards())


def test_an_edge_out_of_range_is_the_shards_own_error() -> None:
    shards = _shards()
    shards[0]["edges"][0, 0] = 7
    with pytest.raises(ModelCallFailed, match=r"out of (range|bounds)"):
        jacobian(_model(), shards)
