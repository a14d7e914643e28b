"""A per-sample job that was killed goes on from its last checkpoint, and returns the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import (
    CoupledSamples,
    OtherShards,
    SampleResult,
    jacobian,
    per_sample_gradient,
)
from gradbox_engine.per_sample.pieces import Piece
from tests.engine.drawn_models import DrawnModel, samples
from tests.engine.interrupted import Kept, Killed, KilledAt, undisturbed
from tests.engine.per_sample.zoo import Written, build

SIZES = (2, 2, 1)

# Each form on these, and the others in some forms.
EVERY_FORM = ["linear over positions", "embedding twice and tied"]
SOME_FORMS = [
    "group, instance and batch norm",
    "lstm",
    "unused layer",
    "convolution called twice",
    "custom function",
]


def squares(z: Tensor, weight: Tensor) -> Tensor:
    return (z.flatten(1).square() * weight[:, None]).sum(1)


def gradient(**how: Any) -> Callable[..., SampleResult]:
    def run(model: nn.Module, shards: list[dict[str, Tensor]], **given: Any) -> SampleResult:
        inputs = {"weight": torch.arange(1.0, 6.0, dtype=torch.float64)}
        return per_sample_gradient(model, shards, squares, loss_inputs=inputs, **how, **given)

    return run


def rows(**how: Any) -> Callable[..., SampleResult]:
    def run(model: nn.Module, shards: list[dict[str, Tensor]], **given: Any) -> SampleResult:
        made = dict(how)
        if how.get("reduce") == "vjp":
            with torch.no_grad():
                z = torch.cat([model(*shard.values()) for shard in shards])
            made["vectors"] = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)
        if how.get("reduce") == "jvp":
            made["vectors"] = {n: torch.ones_like(p) for n, p in model.named_parameters()}
        return jacobian(model, shards, **made, **given)

    return run


def against_the_first(**how: Any) -> Callable[..., SampleResult]:
    """Let the first shard be another one, whose rows the others' are multiplied with."""

    def run(model: nn.Module, shards: list[dict[str, Tensor]], **given: Any) -> SampleResult:
        first, *own = shards
        return rows(**how)(model, own, against=OtherShards([first]), **given)

    return run


FORMS: dict[str, Callable[..., SampleResult]] = {
    "gradients": gradient(),
    "gradients, factored": gradient(form="factored"),
    "norms of gradients": gradient(reduce="norm"),
    "gram of gradients": gradient(reduce="gram"),
    "clipped sum": gradient(reduce="clipped_sum", clip=0.5),
    "projections of gradients": gradient(reduce="projection", dim=7),
    "rows": rows(),
    "rows, factored": rows(form="factored"),
    "rows, the smaller form": rows(form="auto"),
    "norms": rows(reduce="norm"),
    "gram": rows(reduce="gram"),
    "trace of the gram": rows(reduce="gram_trace"),
    "jvp": rows(reduce="jvp"),
    "vjp": rows(reduce="vjp"),
    "projections": rows(reduce="projection", dim=7),
    "gram with other shards": against_the_first(reduce="gram"),
    "vjp, pushed on to other shards": against_the_first(reduce="vjp"),
}


PROBLEMS = [
    *((name, form) for name in EVERY_FORM for form in FORMS),
    *(
        (name, form)
        for name in SOME_FORMS
        for form in ("rows", "gradients, factored", "clipped sum")
    ),
]


def shards_of(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    cut = {name: x.split(SIZES) for name, x in inputs.items()}
    return [{name: parts[i] for name, parts in cut.items()} for i in range(len(SIZES))]


def told(result: SampleResult) -> dict[str, Any]:
    """Everything that a result says but its time; of factors, their tensors."""
    tensors = {**result.arrays, **{f"norms/{n}": x for n, x in result.parameter_norms.items()}}
    if result.values is not None:
        tensors["values"] = result.values
    for index, piece in enumerate(result.factors.pieces if result.factors else ()):
        for name, term in piece.items():
            tensors |= {f"{index}/{name}/{own}": x for own, x in term.tensors().items()}
    fields = ("roads", "loops", "unreached", "names", "samples", "outputs")
    return {"tensors": tensors, **{name: getattr(result, name) for name in fields}}


def same(found: SampleResult, expected: SampleResult) -> bool:
    mine, theirs = told(found), told(expected)
    a, b = mine.pop("tensors"), theirs.pop("tensors")
    return mine == theirs and a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def answer(name: str, form: str, **given: Any) -> SampleResult:
    model, inputs = build(name)  # another process has no plans of this one
    return FORMS[form](model, shards_of(inputs), **given)


@cache
def expected_answer(name: str, form: str) -> SampleResult:
    return answer(name, form)


@pytest.mark.parametrize(("shards", "samples"), [(1, 2), (3, 5)])
@pytest.mark.parametrize(("name", "form"), PROBLEMS)
def test_a_killed_job_goes_on_with_the_same_bits(
    name: str, form: str, shards: int, samples: int
) -> None:
    kept = Kept()
    with pytest.raises(Killed):
        answer(name, form, checkpoints=kept, observer=KilledAt("samples", samples))
    of_others = "other shards" in form  # whose rows are made again
    assert kept.num_written == shards - of_others
    resumed = undisturbed()
    found = answer(name, form, checkpoints=kept, observer=resumed)
    assert same(found, expected_answer(name, form))
    assert min(done for _, done in resumed.steps) == (0 if of_others else samples)


class Rows:
    """A sink that outlives the process, as a file does."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self.samples: set[int] = set()
        self.begun = False

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.begun = True
        if not self.arrays:
            self.arrays = {n: torch.zeros(s, dtype=dtypes[n]) for n, s in shapes.items()}

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        whole = self.arrays[name]
        place = whole[at[0], at[1]] if whole.dim() == 2 else whole[at]
        place.copy_(piece.reshape(place.shape))
        self.samples.update(range(at[0].start, at[0].stop))


@pytest.mark.parametrize(("samples", "left"), [(2, {2, 3, 4}), (4, {4}), (5, set())])
def test_rows_that_a_sink_has_are_not_sent_again(samples: int, left: set[int]) -> None:
    model, inputs = build("linear over positions")
    expected, sink, kept = jacobian(model, shards_of(inputs)), Rows(), Kept()
    with pytest.raises(Killed):
        jacobian(
            model,
            shards_of(inputs),
            sink=sink,
            checkpoints=kept,
            observer=KilledAt("samples", samples),
        )
    assert not any(x.numel() for n, x in kept.tensors.items() if n.startswith("rows/"))
    sink.samples.clear()
    sink.begun = False
    jacobian(model, shards_of(inputs), sink=sink, checkpoints=kept)
    assert sink.begun
    assert sink.samples == left
    assert all(torch.equal(sink.arrays[n], x) for n, x in expected.arrays.items())


def test_a_job_that_goes_on_compares_its_first_shard() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return h + (x[0, 0] > 100) * h.mean(0)

    def anew(**given: Any) -> SampleResult:
        torch.manual_seed(0)
        model = Written(forward, a=nn.Linear(4, 3)).double()
        shards = [{"0": torch.randn(2, 4, dtype=torch.float64)} for _ in range(2)]
        shards[1]["0"][0, 0] = 101.0  # from here on one sample sees the other
        return jacobian(model, shards, **given)

    kept = Kept()
    with pytest.raises(Killed):
        anew(checkpoints=kept, observer=KilledAt("samples", 2))
    with pytest.raises(CoupledSamples):
        anew(checkpoints=kept)


class KilledBehind:
    """Ends a job once it has written so many states."""

    def __init__(self, kept: Kept, num_written: int) -> None:
        self._kept, self._num_written = kept, num_written

    def step(self, phase: str, done: int, total: int) -> None:
        if self._kept.num_written == self._num_written:
            raise Killed


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [394, 823])
def test_plans_are_made_on_the_shards_that_an_undisturbed_job_makes_them_on(
    seed: int, shards: int
) -> None:
    """Which expert a position goes to differs from shard to shard; three shapes take turns."""

    def anew(**given: Any) -> SampleResult:
        model = DrawnModel(seed).eval()
        assert "experts" in model.names
        return jacobian(model, samples(seed, [3, 1, 3, 2, 1]), **given)

    expected, kept = anew(), Kept()
    with pytest.raises(Killed):
        anew(checkpoints=kept, observer=KilledBehind(kept, shards))
    assert same(anew(checkpoints=kept), expected)


class FirstAlone(Kept):
    """Keeps a job's first state, as of a job that is killed long after it."""

    def due(self) -> bool:
        return self.num_written == 0


@pytest.mark.parametrize("seed", [807, 934])
def test_plans_that_a_process_made_behind_its_state_are_made_anew_when_it_goes_on(
    seed: int,
) -> None:
    """A worker that lives on has the plans of the attempt that it ended."""

    def answer(model: nn.Module, **given: Any) -> SampleResult:
        return jacobian(model.eval(), samples(seed, [3, 1, 3, 2, 1]), **given)

    expected, kept, model = answer(DrawnModel(seed)), FirstAlone(), DrawnModel(seed)
    with pytest.raises(Killed):
        answer(model, checkpoints=kept, observer=KilledAt("samples", 10))
    assert same(answer(model, checkpoints=kept), expected)


def test_rows_in_fp16_go_on_with_the_same_bits() -> None:
    def anew(**given: Any) -> SampleResult:
        model, inputs = build("linear over positions")
        shards = [{n: x.float() for n, x in shard.items()} for shard in shards_of(inputs)]
        return gradient()(model.float(), shards, precision="fp16", **given)

    expected, kept = anew(), Kept()
    with pytest.raises(Killed):
        anew(checkpoints=kept, observer=KilledAt("samples", 2))
    assert same(anew(checkpoints=kept), expected)
