"""What users ask for: every computation, each with its answer known in float64 beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from gradbox import (
    Cotangents,
    Forward,
    Gradient,
    GradResult,
    Jacobian,
    MixedGradient,
    PerSampleGradient,
)
from gradbox.computations import Computation
from proofs.chaos.models import unhurried
from tests import case_models, cases, mixed_cases, oracle
from tests.cases import CASES, Case
from tests.engine.per_sample import naive
from tests.mixed_cases import MIXED_CASES

NUM_VARIANTS = 4
"""Data that differ, so that uploads do too; the answers to each are computed once."""


class Pending(Protocol):
    """A job that was accepted."""

    @property
    def job(self) -> Any: ...

    def result(self) -> GradResult: ...


Submit = Callable[[Computation], Pending]
Problem = Callable[[Submit, int], None]
"""Submits the computations of one variant, and raises `Wrong` where an answer differs."""


class Wrong(AssertionError):
    """The box returned something else than the right answer."""


def check(found: float, tolerance: float, *, what: str) -> None:
    """Compare a relative difference with its tolerance.

    Raises:
        Wrong: it is larger, or not a number.
    """
    if not found <= tolerance:
        raise Wrong(f"{what}: relative difference {found:.3g}, at most {tolerance:.0e} is right")


def check_grads(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, what: str) -> None:
    check(oracle.difference(found, expected), oracle.TOLERANCE, what=what)


def check_tensor(found: Tensor, expected: Tensor, *, what: str) -> None:
    found, expected = found.detach(), expected.detach()
    check(naive.difference(found, expected), naive.TOLERANCE, what=what)


# --- set gradients -----------------------------------------------------------------------------


@cache
def _case(name: str, variant: int) -> tuple[Case, oracle.Answer]:
    """Return a case with the data of a variant, and its answer."""
    made = _unhurried_case() if name == "unhurried" else CASES[name]()
    groups = {
        group: [{n: _scaled(x, variant) for n, x in shard.items()} for shard in shards]
        for group, shards in made.groups.items()
    }
    case = replace(made, groups=groups, seed=made.seed + variant)
    return case, oracle.naive(replace(case, model=_fast(case.model)))


def _unhurried_case() -> Case:
    shards = [{"0": x} for x in torch.randn(72, 5, dtype=torch.float64, generator=_rng(1)).split(4)]
    return Case(unhurried, {"z": shards}, cases.whitening)


def _fast(model: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    """Return a model without what makes it slow: the oracle needs its layers alone."""
    return (lambda: model().layers) if model is unhurried else model


def _scaled(x: Tensor, variant: int) -> Tensor:
    return x * (1 + variant / 8) if x.is_floating_point() else x


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _of(case: Case, **given: Any) -> dict[str, Any]:
    return {
        "model": case.model.__name__,
        "inputs": case.groups if case.groups.keys() != {"z"} else case.groups["z"],
        "method": case.methods or "forward",
        "mode": case.mode,
        "seed": case.seed,
        **given,
    }


def _gradient_of(case: Case, **given: Any) -> Gradient:
    return Gradient(**_of(case, loss=case.loss, loss_inputs=case.loss_inputs, **given))


@dataclass(frozen=True)
class SetGradient:
    """A gradient of a loss that couples all shards, with its buffers."""

    case: str
    retain: Any = "auto"

    def __call__(self, submit: Submit, variant: int) -> None:
        case, expected = _case(self.case, variant)
        job = submit(_gradient_of(case, returns=("grads", "buffers"), retain=self.retain))
        result = job.result()
        check(abs(result.loss - expected.loss) / abs(expected.loss), oracle.TOLERANCE, what="loss")
        renamed = {n.removeprefix("layers."): grad for n, grad in result.grads.items()}
        check_grads(renamed, expected.grads, what=f"gradient of {self.case}")
        for name, buffer in result.buffers.items():
            wanted = expected.buffers[name.removeprefix("layers.")]
            check_tensor(buffer.double(), wanted.double(), what=f"buffer {name}")


def loss_on_this_side(submit: Submit, variant: int) -> None:
    """A forward job, its loss here, and the gradient at its cotangents."""
    case, expected = _case("mlp, a sum", variant)
    forward = submit(Forward(**_of(case)))
    z = forward.result().outputs["z"].clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(case.loss(z), z)
    result = submit(Gradient(loss=Cotangents({"z": cotangent}, of=forward.job))).result()
    check_grads(result.grads, expected.grads, what="gradient at cotangents")


def large_bodies(submit: Submit, variant: int) -> None:
    """Megabytes up and down: what is cut in the middle of a body is this."""
    # Data of its own each time, so that none is on the box already.
    generator = torch.Generator()
    generator.seed()
    x = torch.randn(24_000, 5, dtype=torch.float64, generator=generator)
    found = submit(Forward(model="mlp", inputs=list(x.split(8_000)))).result().outputs["z"]
    check_tensor(found, _mlp()(x), what="large outputs")


def four_at_once(submit: Submit, variant: int) -> None:
    """Four jobs wait together."""
    case, expected = _case("cnn in train", variant)
    for job in [submit(_gradient_of(case)) for _ in range(4)]:
        check_grads(job.result().grads, expected.grads, what="one of four gradients")


@cache
def _mlp() -> torch.nn.Module:
    return case_models.mlp()


# --- per sample and mixed ----------------------------------------------------------------------


@cache
def _rows(variant: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return shards, targets, the rows of the gradient and those of the Jacobian of an mlp."""
    x = torch.randn(7, 5, dtype=torch.float64, generator=_rng(variant))
    target = torch.randn(7, 3, dtype=torch.float64, generator=_rng(variant + 100))
    model = _mlp()
    parameters, z = dict(model.named_parameters()), model(x)
    gradients = naive.rows(_distance(z, target)[:, None], parameters)
    return (
        list(x.split(4)),
        target,
        {name: row[:, 0] for name, row in gradients.items()},
        naive.rows(z, parameters),
    )


def _distance(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().cumsum(1).sum(1)


def per_sample_rows(submit: Submit, variant: int) -> None:
    shards, target, rows, _ = _rows(variant)
    job = submit(
        PerSampleGradient(
            model="mlp", inputs=shards, loss=_distance, loss_inputs={"target": target}
        )
    )
    check_tensor(job.result().flat(), naive.flat(rows, 1), what="rows")


def clipped_sum(submit: Submit, variant: int) -> None:
    shards, target, rows, _ = _rows(variant)
    computation = PerSampleGradient(
        model="mlp",
        inputs=shards,
        loss=_distance,
        loss_inputs={"target": target},
        reduce="clipped_sum",
        clip=1.5,
    )
    G = naive.flat(rows, 1)
    expected = (1.5 / G.norm(dim=1)).clamp(max=1) @ G
    check_tensor(submit(computation).result().flat(), expected, what="clipped sum")


def jacobian(submit: Submit, variant: int) -> None:
    shards, _, _, rows = _rows(variant)
    result = submit(Jacobian(model="mlp", inputs=shards)).result()
    check_tensor(result.flat(), naive.flat(rows), what="Jacobian")


def gram(submit: Submit, variant: int) -> None:
    shards, _, _, rows = _rows(variant)
    J = naive.flat(rows)
    result = submit(Jacobian(model="mlp", inputs=shards, reduce="gram")).result()
    check_tensor(result.gram(), torch.einsum("byp,czp->bycz", J, J), what="Gram")


@cache
def _mixed() -> tuple[mixed_cases.MixedCase, mixed_cases.MixedAnswer]:
    make = MIXED_CASES["generator in train"]
    return make(), mixed_cases.double_backward(make())


def mixed(submit: Submit, variant: int) -> None:
    """The gradient penalty of a generator with batch norm."""
    case, expected = _mixed()
    told = {"inner": case.inner, "outer": case.outer, "mode": case.mode, "seed": case.seed}
    result = submit(MixedGradient(model="generator", inputs=case.shards, y=case.y, **told)).result()
    found = oracle.difference(result.grads, expected.grads)
    check(found, mixed_cases.TOLERANCE, what="mixed gradient")


PROBLEMS: dict[str, Problem] = {
    "gradient": SetGradient("mlp, labels"),
    "gradient, dropout in place": SetGradient("in-place activations", retain=0),
    "gradient, batch norm": SetGradient("cnn in train", retain=0),
    "gradient, two towers": SetGradient("two towers"),
    "gradient, seconds long": SetGradient("unhurried"),
    "gradient, seconds long, all replayed": SetGradient("unhurried", retain=0),
    "forward and cotangents": loss_on_this_side,
    "large bodies": large_bodies,
    "four at once": four_at_once,
    "per-sample rows": per_sample_rows,
    "per-sample clipped sum": clipped_sum,
    "Jacobian": jacobian,
    "Jacobian's Gram": gram,
    "mixed gradient": mixed,
}


def know_the_answers() -> None:
    """Compute all answers now: the oracles use torch's one random state, sessions are threads."""
    for problem in PROBLEMS.values():
        for variant in range(NUM_VARIANTS):
            if isinstance(problem, SetGradient):
                _case(problem.case, variant)
            _case("mlp, a sum", variant)
            _case("cnn in train", variant)
            _rows(variant)
    _mixed()
