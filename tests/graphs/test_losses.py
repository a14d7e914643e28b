"""Each builtin loss against its formula written out in loops, and against what is said of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox import losses
from gradbox.builtin_losses.signatures import BUILTIN_SIGNATURES, check_builtin
from gradbox.errors import InvalidInputs, InvalidJob

N, D = 7, 3
Z = torch.randn(N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(N, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])
TIMES = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0, 2.0, 1.0])
EVENTS = torch.tensor([1, 1, 1, 0, 0, 1, 1])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, dim=0))


def softmax_share(scores: list[float], index: int) -> float:
    return math.exp(scores[index]) / sum(math.exp(score) for score in scores)


def info_nce() -> float:
    rows = [[cosine(q, p) / 0.05 for p in Y] for q in Z]
    return -sum(math.log(softmax_share(row, i)) for i, row in enumerate(rows)) / N


def clip_symmetric() -> float:
    scale = math.exp(1.5)
    rows = [[scale * cosine(a, b) for b in Y] for a in Z]
    columns = [[row[j] for row in rows] for j in range(N)]
    both = [softmax_share(row, i) for half in (rows, columns) for i, row in enumerate(half)]
    return -sum(map(math.log, both)) / (2 * N)


def supervised_contrastive() -> float:
    terms = []
    for i in range(N):
        others = [j for j in range(N) if j != i]
        scores = [cosine(Z[i], Z[j]) / 0.07 for j in others]
        positives = [k for k, j in enumerate(others) if LABELS[j] == LABELS[i]]
        if positives:
            logs = [math.log(softmax_share(scores, k)) for k in positives]
            terms.append(-sum(logs) / len(logs))
    return sum(terms) / len(terms)


def vicreg() -> float:
    total = 25.0 * float(((Z - Y) ** 2).sum()) / (N * D)
    for x in (Z, Y):
        spreads = [max(0.0, 1 - math.sqrt(float(x[:, d].var()) + 1e-4)) for d in range(D)]
        total += 25.0 / 2 * sum(spreads) / D
        cov = torch.cov(x.T)
        total += sum(float(cov[d, e]) ** 2 for d in range(D) for e in range(D) if d != e) / D
    return total


def barlow_twins() -> float:
    total = 0.0
    for d in range(D):
        for e in range(D):
            left, right = Z[:, d] - Z[:, d].mean(), Y[:, e] - Y[:, e].mean()
            scale = math.sqrt(float((left**2).mean()) + 1e-5)
            scale *= math.sqrt(float((right**2).mean()) + 1e-5)
            c = float((left * right).mean()) / scale
            total += (1 - c) ** 2 if d == e else 0.0051 * c**2
    return total


def mmd() -> float:
    def kernel(a: Tensor, b: Tensor) -> float:
        return math.exp(-float(((a - b) ** 2).sum()) / 2)

    def mean(left: Tensor, right: Tensor) -> float:
        return sum(kernel(a, b) for a in left for b in right) / (len(left) * len(right))

    few = Y[:4]
    return mean(Z, Z) + mean(few, few) - 2 * mean(Z, few)


def wasserstein_1d() -> float:
    gaps = [
        (a - b) ** 2
        for d in range(D)
        for a, b in zip(sorted(Z[:, d].tolist()), sorted(Y[:, d].tolist()), strict=True)
    ]
    return sum(gaps) / len(gaps)


def triplet_all() -> float:
    terms = []
    for a in range(N):
        for p in range(N):
            for n in range(N):
                if a != p and LABELS[a] == LABELS[p] and LABELS[a] != LABELS[n]:
                    near, far = ((Z[a] - Z[p]) ** 2).sum(), ((Z[a] - Z[n]) ** 2).sum()
                    terms.append(max(0.0, float(near - far) + 0.2))
    return sum(terms) / len(terms)


def cox_partial_likelihood() -> float:
    risk = Z[:, 0]
    terms = [
        float(risk[i]) - math.log(sum(math.exp(risk[j]) for j in range(N) if TIMES[j] >= TIMES[i]))
        for i in range(N)
        if EVENTS[i]
    ]
    return -sum(terms) / len(terms)


def cross_entropy() -> float:
    return -sum(math.log(softmax_share(Z[i].tolist(), int(LABELS[i]) % D)) for i in range(N)) / N


FORMULAS: dict[Callable[[], float], tuple[Any, ...]] = {
    info_nce: (Z, Y),
    clip_symmetric: (Z, Y, torch.tensor(1.5, dtype=torch.float64)),
    supervised_contrastive: (Z, LABELS),
    vicreg: (Z, Y),
    barlow_twins: (Z, Y),
    mmd: (Z, Y[:4]),
    wasserstein_1d: (Z, Y),
    triplet_all: (Z, LABELS),
    cox_partial_likelihood: (Z[:, :1], TIMES, EVENTS),
    cross_entropy: (Z, LABELS % D),
}


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_a_loss_is_its_formula(formula: Callable[[], float]) -> None:
    got = losses.BUILTIN[formula.__name__](*FORMULAS[formula])
    assert got.shape == ()
    assert float(got) == pytest.approx(formula(), rel=1e-10)


@pytest.mark.parametrize("name", ["info_nce", "clip_symmetric", "vicreg", "barlow_twins"])
def test_one_tensor_holds_pairs_in_two_halves(name: str) -> None:
    loss = losses.BUILTIN[name]
    torch.testing.assert_close(loss(torch.cat([Z, Y])), loss(Z, Y))


def test_passages_beyond_the_queries_are_hard_negatives() -> None:
    assert losses.info_nce(Z[:3], Y) > losses.info_nce(Z[:3], Y[:3])


def test_samples_without_partners_give_zero_and_a_finite_gradient() -> None:
    z = Z.clone().requires_grad_()
    for loss in (losses.supervised_contrastive, losses.triplet_all):
        value = loss(z, torch.arange(N))
        assert value == 0
        assert torch.autograd.grad(value, z)[0].abs().max() == 0


def test_signatures_without_torch_say_what_the_functions_take() -> None:
    assert list(BUILTIN_SIGNATURES) == list(losses.BUILTIN)
    for name, signature in BUILTIN_SIGNATURES.items():
        parameters = inspect.signature(losses.BUILTIN[name]).parameters
        tensors = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
        options = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        assert signature.summary == (losses.BUILTIN[name].__doc__ or "").splitlines()[0]
        assert [t.name for t in signature.tensors] == [p.name for p in tensors]
        assert [t.required for t in signature.tensors] == [p.default is not None for p in tensors]
        assert {o.name: o.default for o in signature.options} == options


def test_a_fitting_builtin_is_accepted() -> None:
    check_builtin("info_nce", {"temperature": 1}, groups=["z"], inputs=[])
    check_builtin("info_nce", {}, groups=["passages", "queries"], inputs=[])
    check_builtin("info_nce", {}, groups=["anything"], inputs=["passages"])
    check_builtin("cross_entropy", {"reduction": "sum"}, groups=["z"], inputs=["labels"])
    check_builtin("clip_symmetric", {}, groups=["images", "texts"], inputs=["log_scale"])


@pytest.mark.parametrize(
    ("name", "options", "groups", "inputs", "says"),
    [
        ("infonce", {}, ["z"], [], "there are info_nce"),
        ("info_nce", {"temp": 0.1}, ["z"], [], "it has temperature"),
        ("info_nce", {"temperature": 0}, ["z"], [], "greater than 0"),
        ("info_nce", {"temperature": math.nan}, ["z"], [], "finite number"),
        ("info_nce", {"temperature": True}, ["z"], [], "finite number"),
        ("info_nce", {"temperature": "0.1"}, ["z"], [], "finite number"),
        ("cross_entropy", {"reduction": "none"}, ["z"], ["labels"], "one of mean, sum"),
        ("wasserstein_1d", {"power": 0.5}, ["z"], ["reference"], "at least 1"),
        ("cross_entropy", {}, ["z"], [], "labels is missing"),
        ("cross_entropy", {}, ["z"], ["label"], "label is no tensor"),
        ("info_nce", {}, ["a", "b"], [], "a, b is no tensor"),
        ("info_nce", {}, ["z"], ["queries"], "given twice"),
    ],
)
def test_a_builtin_that_cannot_be_called_is_refused(
    name: str, options: dict[str, Any], groups: list[str], inputs: list[str], says: str
) -> None:
    with pytest.raises((InvalidJob, InvalidInputs), match=says):
        check_builtin(name, options, groups=groups, inputs=inputs)


COLUMN = LABELS[:, None]


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        ("supervised_contrastive", (Z, COLUMN)),
        ("triplet_all", (Z, COLUMN)),
        ("cox_partial_likelihood", (Z[:, 0], TIMES[:, None], EVENTS)),
        ("cox_partial_likelihood", (Z[:, 0], TIMES, EVENTS[:, None])),
        ("cox_partial_likelihood", (Z, TIMES, EVENTS)),
        ("wasserstein_1d", (Z[:, :1], Y[:, 0])),
        ("wasserstein_1d", (Z, Y[:1])),
        ("barlow_twins", (Z, Y[:, :1])),
        ("vicreg", (Z, Y[:, :1])),
        ("clip_symmetric", (Z, Y, torch.ones(N))),
    ],
)
def test_tensors_of_another_shape_are_refused(loss: str, given: tuple[Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got (shape )?\("):
        getattr(losses, loss)(*given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_times_of_any_type_give_the_same_likelihood(dtype: torch.dtype) -> None:
    times = TIMES - 1  # with a zero, whose negative an unsigned number has not
    expected = losses.cox_partial_likelihood(Z[:, 0], times, EVENTS)
    assert torch.equal(losses.cox_partial_likelihood(Z[:, 0], times.to(dtype), EVENTS), expected)


@pytest.mark.parametrize("loss", ["triplet_all", "mmd"])
def test_distances_hold_far_from_zero(loss: str) -> None:
    other = LABELS if loss == "triplet_all" else Y.float()
    near, far = (Z.float().requires_grad_() for _ in range(2))
    moved = other if loss == "triplet_all" else other + 1024
    (found,) = torch.autograd.grad(getattr(losses, loss)(far + 1024, moved), far)
    (expected,) = torch.autograd.grad(getattr(losses, loss)(near, other), near)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
