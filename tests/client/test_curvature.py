"""Curvature of gradient stores on a box that runs, against dense matrices in float64.

Shapes: B samples, T positions, r and c of a layer's matrix [weight | bias].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import CountSketch, GradStore, InvalidInputs, InvalidJob, PerLayer, StoreNotFound
from gradbox.client import GradClient
from gradbox_factors import TwoSided
from tests.boxes import TestBox
from tests.case_models import cnn, mlp

SEED = 3
BUILD: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
SHAPES = {"mlp": (5,), "cnn": (2, 6, 6)}
FITTED, STORED, ASKED = (12, 1), (6, 2), (4, 3)  # samples and seeds
CLOSE = {"rtol": 2e-4, "atol": 1e-5}


def loss(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels, reduction="none")


def samples(model: str, count: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *SHAPES[model], generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (count,), generator=generator)
    return {
        "inputs": [x[: count // 3], x[count // 3 :]],
        "loss": loss,
        "loss_inputs": {"labels": labels},
    }


@dataclass(frozen=True)
class Layer:
    """A layer's inputs (B, T, c), ones behind them, and output gradients (B, T, r), projected."""

    a: Tensor
    g: Tensor

    @property
    def rows(self) -> Tensor:
        """M_b, (B, r c)."""
        return torch.einsum("btr,btc->brc", self.g, self.a).flatten(1)

    def factors(self) -> tuple[Tensor, Tensor]:
        samples, positions = self.a.shape[:2]
        G = torch.einsum("btr,bts->rs", self.g, self.g) / samples
        A = torch.einsum("btc,btd->cd", self.a, self.a) / (samples * positions)
        return G, A

    def curvature(self, kind: str) -> Tensor:
        """H, (r c, r c)."""
        G, A = self.factors()
        if kind == "kfac":
            return torch.kron(G, A)
        U = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
        return U @ torch.diag((self.rows @ U).square().mean(0)) @ U.T


def layers(name: str, given: dict[str, Any], dim: int | None) -> list[Layer]:
    """Return the linear and convolution layers by hooks, one backward pass of all samples."""
    model, found = BUILD[name]().eval(), []
    x = torch.cat(given["inputs"]).requires_grad_()
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(layer: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            a = inputs[0].detach()
            if isinstance(module, nn.Conv2d):
                a = F.unfold(a, module.kernel_size, padding=module.padding).mT
            output.register_hook(lambda g: kept.update({layer: (a, g)}))

        return hook

    kinds = nn.Linear | nn.Conv2d
    named = {n: m for n, m in model.named_modules() if isinstance(m, kinds)}
    for layer, module in named.items():
        module.register_forward_hook(keep(layer))
    loss(model(x), given["loss_inputs"]["labels"]).sum().backward()
    projection = TwoSided(dim or 10**6, SEED)
    for layer in named:
        a, g = kept[layer]
        a = a.reshape(len(a), -1, a.shape[-1])
        g = g.flatten(2).mT if g.dim() == 4 else g[:, None]
        weight = f"{layer}.weight"
        a = projection.of_columns(a, weight)
        found.append(Layer(F.pad(a, (0, 1), value=1.0), projection.of_rows(g, weight)))
    return found


def expected(
    name: str, kind: str, dim: int | None, *, damping: float | None = None, off: float = 0.0
) -> Tensor:
    total = torch.zeros(ASKED[0], STORED[0], dtype=torch.float64)
    of_all = (layers(name, samples(name, *which), dim) for which in (FITTED, STORED, ASKED))
    for fitted, stored, asked in zip(*of_all, strict=True):
        H = fitted.curvature(kind)
        H[0, 0] *= 1 + off
        added = 0.1 * H.trace() / len(H) if damping is None else damping
        total += asked.rows @ torch.linalg.solve(
            H + added * torch.eye(len(H), dtype=H.dtype), stored.rows.T
        )
    return total


def made(client: GradClient, model: str, dim: int | None, **given: Any) -> GradStore:
    projection = None if dim is None else PerLayer(dim)
    store = client.store(
        "fitted", model=model, projection=projection, dtype="fp32", seed=SEED, **given
    )
    store.add(**samples(model, *STORED), ids=range(STORED[0]))
    return store


@pytest.mark.parametrize("dim", [None, 3])
@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_curvature_by_layers_is_that_of_dense_matrices(
    client: GradClient, model: str, kind: Any, dim: int | None
) -> None:
    store = made(client, model, dim)
    before = store.view.size_bytes
    fitted = store.fit(kind, **samples(model, *FITTED))
    norms = [] if model == "mlp" else ["1.weight", "1.bias", "5.weight", "5.bias"]
    assert (fitted.left_out, fitted.num_samples) == (norms, FITTED[0])
    assert fitted.layers[0] == ["0.weight", "0.bias"]
    assert store.view.size_bytes == before + fitted.size_bytes
    asked = samples(model, *ASKED)
    for damping in (None, 0.01):
        scores = torch.as_tensor(
            store.scores(**asked, precondition=kind, damping=damping)[:]
        ).double()
        assert torch.allclose(scores, expected(model, kind, dim, damping=damping), **CLOSE)
        wrong = expected(model, kind, dim, damping=damping, off=0.05)
        assert not torch.allclose(scores, wrong, **CLOSE)
    hits = store.query(**asked, precondition=kind, top=2)
    best = expected(model, kind, dim).topk(2)
    assert hits.ids == best.indices.tolist()
    assert hits.manifest.curvature.left_out == norms


@pytest.mark.parametrize("together", [True, False])
def test_the_kernel_is_that_of_the_rows(
    box: TestBox, client: GradClient, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        if box.transport is None:
            pytest.skip("the bound is lowered in the box's own process")
        monkeypatch.setattr("gradbox_worker.stores.curvature.MOST_TOGETHER", 9)
    store = made(client, "mlp", 3)
    fitted = store.fit("kernel", damping=0.01)
    assert fitted.num_samples == STORED[0]
    rows = store.rows[:].double()
    queries = client.store("asked", model="mlp", projection=PerLayer(3), dtype="fp32", seed=SEED)
    queries.add(**samples("mlp", *ASKED), ids=range(ASKED[0]))
    asked = queries.rows[:].double()
    sizes = [rows.shape[1]] if together else list(store.view.columns.values())
    exact = torch.zeros(len(asked), len(rows), dtype=torch.float64)
    for q, x in zip(asked.split(sizes, 1), rows.split(sizes, 1), strict=True):
        H = x.T @ x / len(x) + 0.01 * torch.eye(x.shape[1], dtype=x.dtype)
        exact += q @ torch.linalg.solve(H, x.T)
    scores = store.scores(**samples("mlp", *ASKED), precondition="kernel")
    assert torch.allclose(torch.as_tensor(scores[:]).double(), exact, **CLOSE)
    assert [len(names) for names in fitted.layers] == ([6] if together else [1] * 6)


def test_curvature_is_replaced_and_goes_with_what_may_be_read(
    box: TestBox, client: GradClient
) -> None:
    store = made(client, "mlp", 3)
    asked = samples("mlp", *ASKED)
    with pytest.raises(InvalidJob, match=r"has no 'kfac' \(but none\): its owner fits it"):
        store.query(**asked, precondition="kfac")
    first = store.fit("kfac", **samples("mlp", *STORED))
    again = store.fit("kfac", **samples("mlp", *FITTED))
    assert list(store.curvature.values()) == [again]
    assert again.job != first.job
    store.grant("*")
    with box.client(box.other_token) as other:
        theirs = other.find_store(f"{store.view.owner}/fitted")
        assert theirs.query(**asked, precondition="kfac").ids
        with pytest.raises(StoreNotFound, match="only its owner"):
            theirs.fit("kernel")


def test_what_has_no_such_curvature_is_refused_with_the_way_out(client: GradClient) -> None:
    given = samples("mlp", *STORED)
    sketch = client.store("sketch", model="mlp", projection=CountSketch(20), dtype="fp32")
    with pytest.raises(InvalidJob, match="no rows yet"):
        sketch.fit("kernel")
    sketch.add(**given, ids=range(STORED[0]))
    with pytest.raises(InvalidJob, match=r"acts on layers.*fit 'kernel', or make a store"):
        sketch.fit("ekfac", **given)
    assert sketch.fit("kernel").layers == [["projection"]]
    with pytest.raises(InvalidJob, match="expected inputs and a loss with 'kfac'"):
        sketch.fit("kfac")
    with pytest.raises(InvalidJob, match="expected no inputs and no loss with 'kernel'"):
        sketch.fit("kernel", **given)
    norms = client.store("norms", model="cnn", wrt="1.*", projection=PerLayer(3))
    with pytest.raises(InvalidInputs, match=r"none is one's: 1\.weight, 1\.bias; fit 'kernel'"):
        norms.fit("kfac", **samples("cnn", *STORED))
