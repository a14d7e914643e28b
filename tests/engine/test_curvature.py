"""Products with the Hessian and the Gauss-Newton matrix, against the code one would write first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

from gradbox_engine import (
    BadInputs,
    ConjugateGradients,
    Group,
    ModelCallFailed,
    NoTangent,
    NotPositiveDefinite,
    Objective,
    Penalty,
    curvature,
)
from gradbox_engine.errors import BadOutput
from tests import case_models as models
from tests import mixed_models
from tests.cases import CASES, SMOOTH, Case, Shards, smooth
from tests.device import AGAINST_FP64, DEVICE, same_bits
from tests.engine.curving import curved, vectors_of
from tests.oracle import TOLERANCE, curvature_products, difference

# Whose Gauss-Newton matrix is small enough to be written out.
SMALL = (
    "mlp, labels",
    "mlp, some layers",
    "average saved",
    "one number a shard",
    "two towers, one of them",
    "cnn in eval",
)


@pytest.mark.parametrize("name", SMOOTH)
def test_hessian_products_are_those_of_double_backward(name: str) -> None:
    case = smooth(name)
    found, expected = curved(case), curvature_products(case, vectors_of(case))
    assert difference(found.products, expected) <= TOLERANCE
    kept = curved(case, retain="auto")
    for name, rows in found.products.items():
        assert same_bits(kept.products[name], rows)


@pytest.mark.parametrize("name", SMALL)
def test_gauss_newton_products_are_those_of_dense_matrices(name: str) -> None:
    case = smooth(name)
    expected = curvature_products(case, vectors_of(case), kind="ggn")
    assert difference(curved(case, kind="ggn").products, expected) <= TOLERANCE


def test_the_whole_matrix_is_that_of_torch_func() -> None:
    case = replace(smooth("mlp, a sum"), mode="eval")
    model = case.model().to(DEVICE)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat_P = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(flat_P: Tensor) -> Tensor:
        named = unflattened(flat_P, shapes)
        z = [functional_call(model, named, shard["0"].to(DEVICE)) for shard in case.groups["z"]]
        return case.loss(torch.cat(z))

    every = unflattened(torch.eye(len(flat_P), dtype=flat_P.dtype), shapes)
    rows = flat(curved(case, every).products)
    assert difference({"H": rows}, {"H": hessian(loss)(flat_P)}) <= TOLERANCE


def flat(products: dict[str, Tensor]) -> Tensor:
    return torch.cat([rows.flatten(1) for rows in products.values()], 1)


def unflattened(rows: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    parts = torch.split(rows, [shape.numel() for shape in shapes.values()], -1)
    return {
        name: part.reshape(*rows.shape[:-1], *shapes[name])
        for name, part in zip(shapes, parts, strict=True)
    }


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_products_are_those_of_curvlinops(kind: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, shards = models.mlp().to(DEVICE), CASES["mlp"]().groups["z"]
    data = [(shard["0"].to(DEVICE), torch.arange(len(shard["0"])) % 3) for shard in shards]
    operator = {"hessian": "HessianLinearOperator", "ggn": "GGNLinearOperator"}[kind]
    loss = nn.CrossEntropyLoss(reduction="sum")
    parameters = list(model.parameters())
    matrix = getattr(curvlinops, operator)(model, loss, parameters, data, check_deterministic=False)
    vectors = vectors_of(CASES["mlp"]())
    labels = torch.cat([target for _, target in data])
    found = curvature(
        models.mlp().to(DEVICE),
        [Group("z", shards)],
        Objective(
            lambda z, labels: F.cross_entropy(z, labels, reduction="sum"), {"labels": labels}
        ),
        vectors,
        kind=kind,
    )
    given = [rows.movedim(0, -1).to(DEVICE) for rows in vectors.values()]
    expected = dict(zip(vectors, (x.movedim(-1, 0) for x in matrix @ given), strict=True))
    assert difference(found.products, expected) <= 1e-6


@pytest.mark.parametrize("wrong", ["scaled", "another mask", "a shard less", "gauss-newton"])
def test_the_comparison_sees_a_wrong_product(wrong: str) -> None:
    case = replace(smooth("in-place activations"), loss=CASES["mlp, a sum"]().loss)
    expected = curvature_products(case, vectors_of(case))
    shards = {"z": case.groups["z"][:-1]}
    products = {
        "scaled": lambda: {name: 1.001 * rows for name, rows in expected.items()},
        "another mask": lambda: curved(case, seed=case.seed + 1).products,
        "a shard less": lambda: curved(replace(case, groups=shards)).products,
        "gauss-newton": lambda: curved(case, kind="ggn").products,
    }[wrong]()
    assert difference(products, expected) > 1e3 * TOLERANCE


def test_a_loss_with_a_number_a_sample_is_summed() -> None:
    case = smooth("mlp, a sum")
    rows = replace(case, loss=lambda z: z.square().sum(1).exp())
    total = replace(case, loss=lambda z: z.square().sum(1).exp().sum())
    assert difference(curved(rows).products, curved(total).products) <= TOLERANCE
    assert curved(rows).loss == pytest.approx(curved(total).loss)


def test_a_loss_sees_its_samples_in_order() -> None:
    case = smooth("mlp, labels")
    order = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    group = Group("z", case.groups["z"], order=order)
    labels = case.loss_inputs["labels"]
    objective = Objective(case.loss, {"labels": labels[order]})
    model, vectors = case.model().to(DEVICE), vectors_of(case)
    found = curvature(model, [group], objective, vectors, kind="hessian", mode="train", seed=3)
    assert difference(found.products, curved(case).products) <= TOLERANCE


def test_parameters_without_a_vector_count_as_zero() -> None:
    case = smooth("mlp, a sum")
    vectors = vectors_of(case)
    some = {"0.weight": vectors["0.weight"]}
    rest = {n: torch.zeros_like(rows) for n, rows in vectors.items() if n != "0.weight"}
    assert difference(curved(case, some).products, curved(case, rest | some).products) == 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(-1, 3, 4).unbind(1)
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]


@models.seeded
def attention() -> nn.Module:
    return Attention()


@pytest.mark.parametrize("streams", ["shard", "sample"])
def test_fused_attention_is_replaced(streams: str) -> None:
    case = replace(smooth("mlp, a sum"), model=attention)
    expected = curvature_products(case, vectors_of(case))
    assert difference(curved(case, streams=streams).products, expected) <= TOLERANCE


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_models_own_change_nothing(reentrant: bool) -> None:
    case = replace(
        smooth("mlp, a sum"), model=lambda: mixed_models.checkpointed(reentrant=reentrant)
    )
    plain = replace(case, model=lambda: mixed_models.checkpointed(reentrant=False))
    expected = curvature_products(plain, vectors_of(plain))
    assert difference(curved(case).products, expected) <= TOLERANCE


def test_a_model_is_as_before() -> None:
    case = smooth("cnn in train")
    model = case.model().to(DEVICE).requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    groups = [Group("z", case.groups["z"])]
    objective = Objective(case.loss)
    curvature(model, groups, objective, vectors_of(case), kind="ggn", mode="train", retain="auto")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


# --- inverses ----------------------------------------------------------------------------------


def convex() -> Case:
    """Return a case whose loss is convex in the outputs."""
    return replace(smooth("mlp, labels"), loss=lambda z, labels: F.cross_entropy(z, labels))


def dense(case: Case, kind: str) -> Tensor:
    num_columns = sum(rows[0].numel() for rows in vectors_of(case).values())
    shapes = {name: rows.shape[1:] for name, rows in vectors_of(case).items()}
    every = unflattened(torch.eye(num_columns, dtype=torch.float64), shapes)
    return flat(curvature_products(case, every, kind=kind))


@pytest.mark.parametrize(("kind", "damping"), [("ggn", 0.1), ("hessian", 50.0)])
def test_an_inverse_is_that_of_the_dense_matrix(kind: str, damping: float) -> None:
    case = convex()
    vectors = vectors_of(case)
    vectors = {
        name: torch.cat([rows, torch.zeros_like(rows[:1])]) for name, rows in vectors.items()
    }
    solve = ConjugateGradients(damping=damping, max_iterations=300, tolerance=1e-12)
    found = curved(case, vectors, kind=kind, solve=solve)
    matrix = dense(case, kind)
    matrix = matrix + damping * torch.eye(len(matrix), device=matrix.device, dtype=matrix.dtype)
    v_VP, x_VP = flat(vectors).to(matrix), flat(found.products)
    assert difference({"x": x_VP}, {"x": torch.linalg.solve(matrix, v_VP.T).T}) <= 1e-8
    assert max(found.residuals) <= 1e-11
    assert found.iterations[-1] == 0
    assert 0 < max(found.iterations) < 300


def test_steps_end_where_they_are_told_to() -> None:
    case = convex()
    solve = ConjugateGradients(damping=1e-3, max_iterations=4)
    found = curved(case, kind="ggn", solve=solve)
    assert found.iterations == (4, 4, 4)
    assert min(found.residuals) > solve.tolerance


def test_curvature_that_is_not_positive_ends_with_advice() -> None:
    solve = ConjugateGradients(damping=0.0)
    with pytest.raises(NotPositiveDefinite, match="raise damping by more than that, or take kind="):
        curved(convex(), kind="hessian", solve=solve)


class Steps:
    def __init__(self, *, last: int | None = None) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self._last = last

    def step(self, phase: str, done: int, total: int) -> None:
        self.steps.append((phase, done, total))
        if len(self.steps) == self._last:
            raise KeyboardInterrupt


def test_steps_are_counted_and_can_be_stopped() -> None:
    case, steps = convex(), Steps()
    solve = ConjugateGradients(damping=1e-3, max_iterations=4)
    curved(case, kind="ggn", solve=solve, observer=steps)
    assert {(phase, total) for phase, _, total in steps.steps} == {("products", 5)}
    assert [done for _, done, _ in steps.steps] == sorted(done for _, done, _ in steps.steps)
    assert steps.steps[-1] == ("products", 5, 5)
    with pytest.raises(KeyboardInterrupt):
        curved(case, kind="ggn", solve=solve, observer=Steps(last=20))


# --- refusals ----------------------------------------------------------------------------------


class OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Through(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(5, 3, dtype=torch.float64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    ("function", "obstacle"),
    [
        (OnlyOnce.apply, "once_differentiable"),
        (lambda x: torch.cdist(x, x[:1]), "_cdist_backward"),
    ],
)
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_what_cannot_be_differentiated_twice_is_named(
    function: Any, obstacle: str, kind: str
) -> None:
    case = replace(smooth("mlp, a sum"), model=lambda: Through(function))
    with pytest.raises(NoTangent, match=rf"(?s){obstacle}.*out of simpler ones"):
        curved(case, kind=kind)


def test_a_backward_pass_within_another_one_is_refused() -> None:
    block = nn.Linear(3, 3, dtype=torch.float64)

    def model() -> nn.Module:
        built = Through(lambda x: models.RunAgain.apply(x, block).tanh())
        built.block = block
        return built

    with pytest.raises(NoTangent, match="a backward pass within a backward pass"):
        curved(replace(smooth("mlp, a sum"), model=model))


def test_a_loss_that_cannot_be_differentiated_twice_is_named() -> None:
    with pytest.raises(ModelCallFailed, match=r"the loss raised .*_cdist_backward"):
        curved(CASES["mlp"]())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "inputs": ({"wrt": ["*", "inputs.0"]}, BadInputs, "wrt: expected real parameters"),
    "penalties": ({"penalties": [Penalty("0", torch.norm)]}, BadInputs, "set_gradient takes them"),
    "float16": ({"precision": "fp16"}, BadInputs, "take precision='bf16', or 'fp64'"),
    "an unknown name": ({"vectors": {"w": torch.ones(1, 3)}}, BadInputs, r"'w': \(1, 3\)"),
    "another shape": ({"vectors": {"4.bias": torch.ones(3)}}, BadInputs, "expected .V, .shape"),
    "no vectors": ({"vectors": {}}, BadInputs, "with one V for all"),
    "no tensor": ({"output": "hidden"}, BadOutput, "hidden"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        curved(smooth("mlp, a sum"), **given)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fewer_digits_are_near(precision: str) -> None:
    case = smooth("mlp, a sum")
    expected = curved(case).products
    shards: Shards = [{n: x.float() for n, x in shard.items()} for shard in case.groups["z"]]
    narrow = replace(case, model=lambda: case.model().float(), groups={"z": shards})
    found = curved(narrow, precision=precision).products
    assert {rows.dtype for rows in found.values()} == {torch.float32}
    near = AGAINST_FP64[DEVICE.type][precision]
    assert difference({"H v": flat(found)}, {"H v": flat(expected)}) <= 2 * near
    assert difference(curved(narrow, precision="fp64").products, expected) <= 1e-5
