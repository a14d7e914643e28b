"""Reductions and factors against the dense rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import shard_stream
from gradbox_engine.per_sample import BadReduction, OtherShards, jacobian, per_sample_gradient
from gradbox_factors import TERMS, Block, Factored
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written, build

NAMES = [
    "linear",
    "linear over positions",
    "dilated grouped convolution, 2d",
    "grouped transposed convolution, 2d",
    "transposed convolution padded by more than a stride, 2d",
    "convolution, 3d",
    "embedding with padding",
    "embedding twice and tied",
    "sparse embedding",
    "group, instance and batch norm",
    "attention with bias_kv",
    "lstm",
    "bare parameters",
    "products",
    "frames merged with samples",
    "convolution called twice",
    "unused layer",
    "checkpointing",
]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    model, inputs = build(request.param)
    return model, inputs, naive.jacobian(model, inputs)


def _close(found: Tensor, expected: Tensor) -> bool:
    return naive.difference(found, expected) <= naive.TOLERANCE


def test_reductions_agree_with_the_dense_rows(case: Any) -> None:
    model, inputs, rows = case
    J = naive.flat(rows)
    B, Y, _ = J.shape
    gram = torch.einsum("byp,czp->bycz", J, J)
    norm = jacobian(model, [inputs], reduce="norm")
    assert _close(norm.arrays["norm"], J.norm(dim=2))
    for name, x in norm.parameter_norms.items():
        assert torch.allclose(x, rows[name].reshape(B, Y, -1).norm(dim=2), atol=1e-12)
    assert _close(jacobian(model, [inputs], reduce="gram").arrays["gram"], gram)
    trace = jacobian(model, [inputs], reduce="gram_trace").arrays["gram"]
    assert _close(trace, torch.einsum("bycy->bc", gram))
    tangents = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    flat = torch.cat([x.flatten() for x in tangents.values()])
    assert _close(jacobian(model, [inputs], reduce="jvp", vectors=tangents).arrays["jvp"], J @ flat)
    u = torch.randn_like(norm.values)
    pulled = jacobian(model, [inputs], reduce="vjp", vectors=u).arrays
    expected = torch.einsum("by,byp->p", u.reshape(B, Y), J)
    assert _close(torch.cat([x.flatten() for x in pulled.values()]), expected)


def test_factors_behave_like_the_dense_rows(case: Any) -> None:
    model, inputs, rows = case
    dense = Factored([{name: Block(name, tuple(x.shape[2:]), x) for name, x in rows.items()}])
    factors = jacobian(model, [inputs], form="factored").factors
    assert factors is not None
    for name, x in rows.items():
        assert torch.allclose(factors.block(name), x, atol=1e-12)
        part = factors.block(name, slice(1, 4), slice(0, 1))
        assert torch.allclose(part, x[1:4, :1], atol=1e-12)
        for b, y in ((slice(2, 2), slice(None)), (slice(1, 3), slice(1, 1))):
            empty = factors.block(name, b, y)
            assert (empty.shape, empty.dtype) == (x[b, y].shape, x.dtype)
    u = torch.randn(factors.samples, factors.outputs, dtype=torch.float64)
    mine, theirs = factors.vjp(u), dense.vjp(u)
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-10) for name in rows)
    assert _close(factors.projection(16, seed=2), dense.projection(16, seed=2))
    assert _close(factors.norms(), dense.norms())


@pytest.mark.parametrize("budget_bytes", [2**30, 1000])
def test_the_smaller_form_has_the_dense_rows_within_any_budget(
    case: Any, budget_bytes: int
) -> None:
    model, inputs, rows = case
    found = jacobian(model, [inputs, inputs], form="auto", budget_bytes=budget_bytes)
    arrays = {n: found.factors.block(n) for n in rows} if found.factors else found.arrays
    for name, x in rows.items():
        assert torch.allclose(arrays[name], torch.cat([x, x]), atol=1e-12)


def test_factors_are_kept_where_they_are_smaller_and_fit_the_budget() -> None:
    model = torch.nn.Linear(20, 30).double()
    shards = [{"0": torch.randn(4, 20, dtype=torch.float64)}] * 2
    dense = jacobian(model, shards, form="dense")
    factored = jacobian(model, shards, form="auto")
    assert factored.factors is not None
    assert factored.factors.factor_bytes < naive.flat(dense.arrays).nbytes
    bound_bytes = factored.factors.factor_bytes - 1
    assert jacobian(model, shards, form="auto", budget_bytes=bound_bytes).factors is None


def test_terms_survive_their_wire_form(case: Any) -> None:
    model, inputs, _ = case
    factors = jacobian(model, [inputs], form="factored").factors
    assert factors is not None
    for name, term in factors.pieces[0].items():
        read = TERMS[term.rule].read(name, term.shape, term.geometry(), term.tensors())
        assert torch.equal(read.block(), term.block())


def test_clipped_sum_clips_whole_rows() -> None:
    model, inputs = build("convolution, 2d")
    z = naive.outputs(model, inputs)
    rows = naive.rows(z.square().sum(1, keepdim=True), dict(model.named_parameters()))
    g = naive.flat(rows)[:, 0]
    clip = float(g.norm(dim=1).median())
    result = per_sample_gradient(
        model, [inputs], lambda z: z.square().sum(1), reduce="clipped_sum", clip=clip
    )
    weights = (clip / g.norm(dim=1)).clamp(max=1)
    found = torch.cat([x.flatten() for x in result.arrays.values()])
    assert _close(found, (g * weights[:, None]).sum(0))


def test_grams_of_several_shards_hold_their_cross_terms() -> None:
    model, inputs = build("linear over positions")
    shards = [{"0": inputs["0"][:2]}, {"0": inputs["0"][2:]}]
    for reduce in ("gram", "gram_trace"):
        cut = jacobian(model, shards, reduce=reduce).arrays["gram"]  # type: ignore[arg-type]
        whole = jacobian(model, [inputs], reduce=reduce).arrays["gram"]  # type: ignore[arg-type]
        assert _close(cut, whole)


def test_projection_keeps_inner_products_on_average_and_its_seed() -> None:
    model, inputs = build("linear over positions")
    dense = naive.flat(naive.jacobian(model, inputs)).flatten(0, 1)
    products = []
    for seed in range(200):
        result = jacobian(model, [inputs], reduce="projection", dim=64, projection_seed=seed)
        s = result.arrays["projection"].flatten(0, 1)
        products.append(s @ s.T)
    apart = naive.difference(torch.stack(products).mean(0), dense @ dense.T)
    assert apart < 0.05
    again = jacobian(model, [inputs], reduce="projection", dim=64, projection_seed=199)
    assert torch.equal(again.arrays["projection"].flatten(0, 1), s)


def test_norms_of_many_numbers_stay_right_in_single_precision() -> None:
    block = Block("w", (30_000_000,), torch.full((1, 1, 30_000_000), 1e-3))
    assert block.squared_norm().item() == pytest.approx(30.0, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduce": "mean"}, "reduce: expected one of"),
        ({"reduce": "projection"}, "dim: expected a whole number"),
        ({"reduce": "projection", "dim": 0}, "dim: expected a whole number"),
        ({"dim": 4}, "dim: expected none"),
        ({"reduce": "vjp"}, "vectors: expected some"),
        ({"reduce": "vjp", "vectors": torch.ones(5, 2)}, r"vectors: expected shape \(5, 3\)"),
        ({"reduce": "jvp", "vectors": {"weight": torch.ones(2)}}, r"vectors\['weight'\]"),
        ({"reduce": "gram", "form": "factored"}, "form='factored'"),
        ({"form": "sparse"}, "form: expected one of"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    model, inputs = build("linear")
    with pytest.raises(BadReduction, match=message):
        jacobian(model, [inputs], **arguments)


@pytest.mark.parametrize("clip", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_that_is_no_bound_is_refused(clip: float | None) -> None:
    model, inputs = build("linear")
    with pytest.raises(BadReduction, match="clip: expected a positive number"):
        per_sample_gradient(model, [inputs], lambda z: z.sum(1), reduce="clipped_sum", clip=clip)


@pytest.mark.parametrize("earlier", [True, False], ids=["an earlier call", "other shards"])
def test_products_with_the_rows_of_others_agree_with_the_dense_rows(
    case: Any, earlier: bool
) -> None:
    model, inputs, rows = case
    J = naive.flat(rows)
    B, Y, _ = J.shape
    shuffled = {name: x.flip(0) for name, x in inputs.items()}
    shards = [shuffled, {name: x[:2] for name, x in shuffled.items()}]
    against = jacobian(model, shards, form="factored").factors if earlier else OtherShards(shards)
    given: dict[str, Any] = {"against": against}
    gram = torch.einsum("byp,czp->bycz", J, torch.cat([J.flip(0), J.flip(0)[:2]]))
    found = jacobian(model, [inputs], reduce="gram", **given)
    assert _close(found.arrays["gram"], gram)
    assert found.samples == B
    values = found.values
    assert values is not None
    if found.other_values is not None:
        assert _close(found.other_values, torch.cat([values.flip(0), values.flip(0)[:2]]))
    assert (found.other_values is None) == earlier
    trace = jacobian(model, [inputs], reduce="gram_trace", **given).arrays["gram"]
    assert _close(trace, torch.einsum("bycy->bc", gram))
    u = torch.randn(B, Y, dtype=J.dtype)
    pulled = jacobian(model, [inputs], reduce="vjp", vectors=u.view(values.shape), **given)
    assert _close(pulled.arrays["jvp"], torch.einsum("by,bycz->cz", u, gram))


def test_other_shards_have_inputs_of_the_loss_of_their_own() -> None:
    model, inputs = build("linear")
    z = model(**inputs) if not any(n.isdigit() for n in inputs) else model(*inputs.values())
    target = torch.randn_like(z)

    def distance(z: Tensor, target: Tensor) -> Tensor:
        return (z - target).square().flatten(1).sum(1)

    def products(given: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        against = OtherShards([inputs], other)
        return per_sample_gradient(
            model, [inputs], distance, loss_inputs=given, reduce="gram", against=against
        ).arrays["gram"]

    def rows(target: Tensor) -> Tensor:
        found = per_sample_gradient(model, [inputs], distance, loss_inputs={"target": target})
        return torch.cat([x.flatten(1) for x in found.arrays.values()], 1)

    found = products({"target": target}, {"target": -target})
    assert _close(found, rows(target) @ rows(-target).T)
    with pytest.raises(BadReduction, match=r"loss_inputs\['target'\]: expected \{group: tensor\}"):
        products({"target": target}, {})


def test_every_shard_runs_under_the_stream_that_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    given: dict[str, Any] = {"mode": "train", "seed": 3}
    own = jacobian(model, [{"0": x}], streams=[(5, 7)], **given)
    with shard_stream(3, group=5, shard=7):
        assert torch.equal(own.values, model.train()(x))
    both = jacobian(model, [{"0": x}], reduce="gram", against=OtherShards([{"0": x}]), **given)
    for values, group in ((both.values, 0), (both.other_values, 1)):
        with shard_stream(3, group=group, shard=0):
            assert torch.equal(values, model.train()(x))


def test_rows_by_other_parameters_are_refused() -> None:
    model, inputs = build("linear")
    earlier = jacobian(model, [inputs], form="factored", wrt=["weight"])
    with pytest.raises(BadReduction, match=r"against: expected rows by the same"):
        jacobian(model, [inputs], reduce="gram", against=earlier.factors)


def _switched(m: Any, x: Tensor) -> Tensor:
    """A shard with a negative sum leaves a layer out."""
    z: Tensor = m.head(x) + m.side(x) if bool(x.sum() > 0) else m.head(x)
    return z


def test_norms_of_a_layer_that_the_first_shard_leaves_out_have_the_range_of_float64() -> None:
    torch.manual_seed(0)
    model = Written(_switched, head=nn.Linear(3, 2), side=nn.Linear(3, 2)).half()
    x = torch.full((4, 3), 300.0, dtype=torch.float16)  # whose square float16 does not hold
    alone = jacobian(model, [{"x": x}], reduce="norm")
    after = jacobian(model, [{"x": -x}, {"x": x}], reduce="norm")
    for name, norms in alone.parameter_norms.items():
        assert torch.equal(after.parameter_norms[name][4:], norms)
    assert torch.equal(after.arrays["norm"][4:], alone.arrays["norm"])
