"""Per-sample gradients and Jacobians in ranges: joined, summed, and multiplied block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadInputs, DeviceLost, Group
from gradbox_engine.per_sample import (
    BadReduction,
    OtherShards,
    SampleResult,
    jacobian,
    per_sample_gradient,
    planned_model,
)
from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.per_sample.planning.probe_runs import plan_for
from gradbox_engine.per_sample.request import Request
from gradbox_engine.ranges import Range, cut
from gradbox_engine.ranges.one_device import done
from gradbox_engine.ranges.samples import (
    RangeSamples,
    SampleRanges,
    SampleTask,
    SplitSamples,
    split_samples,
)
from gradbox_engine.ranges.samples.sample_ranges import gram_of
from gradbox_engine.ranges.samples.split_samples import share_out
from tests.case_models import seeded
from tests.engine.interrupted import Kept, Killed, KilledAt, undisturbed
from tests.engine.per_sample import naive
from tests.engine.ranges.running import EXACT


@seeded
def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.LayerNorm(6), nn.Linear(6, 3)
    )


def _shards(*sizes: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"0": torch.randn(n, 4, generator=generator).double()} for n in sizes]


def _groups(*shards: Sequence[Any]) -> list[Group]:
    return [Group(name, some) for name, some in zip(("z", "against"), shards, strict=False)]


SIZES = (3, 1, 4, 2, 2)
SHARDS = _shards(*SIZES)
OTHERS = _shards(2, 3, 1, seed=5)
LABELS = torch.arange(sum(SIZES)) % 3
OTHER_LABELS = (torch.arange(6) + 1) % 3
TANGENTS = {"0.weight": torch.linspace(-1, 1, 24).double().view(6, 4), "4.bias": torch.ones(3)}
COTANGENTS = torch.linspace(-2, 1, 36).double().view(12, 3)
# As many rows as the first range of two and the second of three have samples, but of classes.
CLASS_WEIGHTS = torch.linspace(1, 2, 8).double()


def _loss(z: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    picked = z.log_softmax(1).gather(1, labels[:, None])[:, 0]
    return -picked * weights[labels]


def _parts(number: int, shards: int = len(SIZES)) -> tuple[Range, ...]:
    return cut([1] * shards, number)


LOSS_INPUTS = {"labels": LABELS, "weights": CLASS_WEIGHTS}
SETTING = {"mode": "train", "seed": 3}

GRADIENTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "factored": {"form": "factored"},
    "automatic": {"form": "auto"},
    "norms": {"reduce": "norm"},
    "gram": {"reduce": "gram"},
    "clipped sum": {"reduce": "clipped_sum", "clip": 0.7},
    "projection": {"reduce": "projection", "dim": 7},
    "gaussian projection": {"reduce": "projection", "dim": 7, "kind": "gaussian"},
}
JACOBIANS: dict[str, dict[str, Any]] = {
    "dense": {},
    "factored": {"form": "factored"},
    "norms": {"reduce": "norm"},
    "gram": {"reduce": "gram"},
    "gram's trace": {"reduce": "gram_trace"},
    "vjp": {"reduce": "vjp", "vectors": COTANGENTS},
    "jvp": {"reduce": "jvp", "vectors": TANGENTS},
    "projection": {"reduce": "projection", "dim": 5},
}


def _request(terms: Mapping[str, Any], **beside: Any) -> Request:
    return Request(**({"reduce": "none", "form": "dense"} | dict(terms) | beside))


def _gradients_in_ranges(
    number: int, terms: Mapping[str, Any], *, shards: Sequence[Any] = SHARDS, **how: Any
) -> SplitSamples:
    request = _request(terms)
    ranges = SampleRanges(_model(), _groups(shards), request, loss=_loss, **SETTING, **how)
    parts = _parts(number, len(shards))
    return split_samples(ranges, _Devices(ranges), parts, request, loss_inputs=LOSS_INPUTS)


def _jacobians_in_ranges(number: int, terms: Mapping[str, Any], **how: Any) -> SplitSamples:
    request = _request(terms)
    ranges = SampleRanges(_model(), _groups(SHARDS), request, **SETTING, **how)
    return split_samples(ranges, _Devices(ranges), _parts(number), request)


def _tensors(result: SampleResult) -> dict[str, Tensor]:
    found = {**result.arrays, **{f"norm {n}": x for n, x in result.parameter_norms.items()}}
    if result.factors is not None:
        found |= {f"rows {name}": result.factors.block(name) for name in result.factors.names}
    assert result.values is not None
    return found | {"values": result.values}


def _check(found: SplitSamples, one: SampleResult, number: int) -> None:
    assert (found.names, found.samples, found.outputs) == (one.names, one.samples, one.outputs)
    assert (found.unreached, found.roads, found.loops) == (one.unreached, one.roads, one.loops)
    assert len(found.ranges) == number
    expected = _tensors(one)
    assert _tensors(found).keys() == expected.keys()
    for name, x in _tensors(found).items():
        if number == 1:
            assert torch.equal(x, expected[name])
        assert naive.difference(x, expected[name]) <= EXACT


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_one_device(name, number):
    terms = GRADIENTS[name]
    one = per_sample_gradient(_model(), SHARDS, _loss, loss_inputs=LOSS_INPUTS, **SETTING, **terms)
    _check(_gradients_in_ranges(number, terms), one, number)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_are_those_of_one_device(name, number):
    terms = JACOBIANS[name]
    one = jacobian(_model(), SHARDS, **SETTING, **terms)
    _check(_jacobians_in_ranges(number, terms), one, number)


@pytest.mark.parametrize("reduce", ["gram", "gram_trace", "vjp"])
def test_jacobians_against_other_shards(reduce):
    terms = {"reduce": reduce} | ({"vectors": COTANGENTS} if reduce == "vjp" else {})
    one = jacobian(_model(), SHARDS, **SETTING, **terms, against=OtherShards(OTHERS))
    request = _request(terms)
    ranges = SampleRanges(_model(), _groups(SHARDS, OTHERS), request, **SETTING)
    found = split_samples(
        ranges, _Devices(ranges), _parts(3), request, other_parts=_parts(2, len(OTHERS))
    )
    _check(found, one, 3)
    assert torch.equal(found.other_values, one.other_values)


def test_gradients_against_other_shards_with_labels_of_their_own():
    others = OtherShards(OTHERS, {"labels": OTHER_LABELS})
    one = per_sample_gradient(
        _model(), SHARDS, _loss, loss_inputs=LOSS_INPUTS, reduce="gram", against=others, **SETTING
    )
    request = _request({"reduce": "gram"})
    ranges = SampleRanges(_model(), _groups(SHARDS, OTHERS), request, loss=_loss, **SETTING)
    found = split_samples(
        ranges,
        _Devices(ranges),
        _parts(2),
        request,
        loss_inputs=LOSS_INPUTS,
        other_parts=_parts(2, len(OTHERS)),
        other_loss_inputs={"labels": OTHER_LABELS},
    )
    _check(found, one, 2)


def test_gradients_against_rows_of_an_earlier_call():
    rows = jacobian(_model(), OTHERS, form="factored", **SETTING).factors
    terms = {"reduce": "vjp", "vectors": COTANGENTS, "against": rows}
    one = jacobian(_model(), SHARDS, **SETTING, **terms)
    _check(_jacobians_in_ranges(3, terms), one, 3)


class _Rows:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}

    def begin(self, shapes: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> None:
        for name, shape in shapes.items():
            self.arrays.setdefault(name, torch.zeros(shape, dtype=dtypes[name]))
            assert self.arrays[name].shape == shape

    def write(self, name: str, at: Any, piece: Tensor) -> None:
        samples, outputs, rows = at
        self.arrays[name][samples, outputs, rows] = piece


@pytest.mark.parametrize("form", ["dense", "auto"])
def test_dense_rows_go_to_their_places_in_one_sink(form):
    sink = _Rows()
    budget = 2**9  # too little for factors of all samples
    found = _gradients_in_ranges(3, {"form": form}, sink=sink, budget_bytes=budget)
    one = per_sample_gradient(_model(), SHARDS, _loss, loss_inputs=LOSS_INPUTS, **SETTING)
    assert found.arrays == {}
    assert found.factors is None
    for name, rows in sink.arrays.items():
        assert torch.equal(rows[:, 0], one.arrays[name])


def test_all_ranges_take_one_form():
    """The second range alone would keep factors: its own samples fit, all of them do not."""
    kept_bytes = sum(
        min(t.dense_bytes, t.factor_bytes) / t.samples
        for t in jacobian(_model(), SHARDS[:1], form="factored").factors.pieces[0].values()
    )
    budget = int(kept_bytes * 6)
    one = jacobian(_model(), SHARDS, form="auto", budget_bytes=budget, **SETTING)
    found = _jacobians_in_ranges(3, {"form": "auto"}, budget_bytes=budget)
    assert (one.factors is None) == (found.factors is None)
    _check(found, one, 3)


def test_shards_of_different_outputs_are_named():
    shards = [{"0": torch.zeros(2, 4).double()}, {"0": torch.zeros(2, 5, 4).double()}]
    request = _request({})
    ranges = SampleRanges(_model(), _groups(shards), request)
    with pytest.raises(BadInputs, match="shard 1: expected 3 outputs a sample like shard 0, got"):
        split_samples(ranges, _Devices(ranges), _parts(2, 2), request)


def test_errors_name_shards_by_their_numbers_in_the_job():
    shards = [*SHARDS[:3], {"0": torch.zeros(2, 9).double()}, SHARDS[4]]
    with pytest.raises(Exception, match="shard 3"):
        _gradients_in_ranges(2, {}, shards=shards)


def test_cotangents_have_a_row_a_sample():
    with pytest.raises(BadReduction, match=r"\(12, \.\.\.\), got \(3, 3\)"):
        _jacobians_in_ranges(2, {"reduce": "vjp", "vectors": COTANGENTS[:3]})


@dataclass
class _Devices:
    """Devices of one process, one for each call; `dies` says at which kind of call one does."""

    ranges: SampleRanges
    dies: Mapping[int, str] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    given: int = 0

    def take(self, part: Range) -> _Device:
        self.given += 1
        return _Device(self, self.given)

    def call(self, kind: str, number: int, function: Any) -> Future[Any]:
        if self.dies.get(number) == kind:
            self.dead.add(number)
        if number in self.dead:
            future: Future[Any] = Future()
            future.set_exception(DeviceLost(f"device {number} died in {kind}"))
            return future
        return done(function)

    def gram(self, left: Any, right: Any, *, trace: bool) -> Future[Tensor]:
        if right is not None and right[0] in self.dead:
            left, right = right, left
        other = None if right is None else right[1]
        return self.call("gram", left[0], lambda: gram_of(left[1], other, trace=trace))


@dataclass
class _Device:
    devices: _Devices
    number: int

    def plans(self, part: Range, shards: Any, *, of_others: bool) -> Future[Plans]:
        ranges = self.devices.ranges
        return self.devices.call(
            "plans", self.number, lambda: ranges.plans(shards, of_others=of_others)
        )

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        ranges = self.devices.ranges
        return self.devices.call("smaller", self.number, lambda: ranges.smaller(part, task))

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        def held() -> RangeSamples:
            found = self.devices.ranges.run(part, task)
            return RangeSamples(found.result, (self.number, found.rows))

        return self.devices.call("run", self.number, held)


@pytest.mark.parametrize(
    ("dies", "lost"),
    [
        ({1: "plans"}, [1, 0, 0]),
        ({5: "run"}, [0, 1, 0]),
        ({4: "run", 5: "run", 7: "run"}, [2, 1, 0]),
        ({4: "gram"}, [1, 0, 0]),
        ({6: "gram"}, [0, 0, 1]),
    ],
)
def test_a_device_that_dies_costs_its_calls(dies, lost):
    request = _request({"reduce": "gram"})
    ranges = SampleRanges(_model(), _groups(SHARDS), request, **SETTING)
    found = split_samples(ranges, _Devices(ranges, dies), _parts(3), request)
    whole = _jacobians_in_ranges(3, {"reduce": "gram"})
    assert torch.equal(found.arrays["gram"], whole.arrays["gram"])
    assert [run.devices_lost for run in found.ranges] == lost


@pytest.mark.parametrize(
    "name", [*(("gradient", n) for n in GRADIENTS), *(("jacobian", n) for n in JACOBIANS)]
)
def test_a_range_goes_on_behind_the_last_shard_of_its_checkpoint(name: tuple[str, str]) -> None:
    kind, of = name

    def answer(kept: dict[int, Kept], observer: KilledAt) -> SplitSamples:
        how = {"observer": observer, "checkpoints": lambda part, task: kept[part.start]}
        if kind == "gradient":
            return _gradients_in_ranges(2, GRADIENTS[of], **how)
        return _jacobians_in_ranges(2, JACOBIANS[of], **how)

    whole, again, kept = undisturbed(), undisturbed(), defaultdict[int, Kept](Kept)
    expected = answer(defaultdict(Kept), whole)
    with pytest.raises(Killed):
        answer(kept, KilledAt("samples", sum(SIZES[:2])))  # behind two shards of the first range
    found = answer(kept, again)
    assert len(again.steps) < len(whole.steps)
    assert found.samples == expected.samples
    tensors = _tensors(found)
    assert all(torch.equal(tensors[key], tensor) for key, tensor in _tensors(expected).items())


class _Apart:
    """Devices that have a model each, one for every range; what passes between them is copied."""

    def __init__(self, devices: Sequence[SampleRanges]) -> None:
        self.devices = devices

    def take(self, part: Range) -> Any:
        return _Device(_Devices(_Copying(self.devices[part.index])), part.index)


class _Copying:
    def __init__(self, ranges: SampleRanges) -> None:
        self.ranges = ranges

    def plans(self, *given: Any, **how: Any) -> Plans:
        return deepcopy(self.ranges.plans(*given, **how))

    def run(self, part: Range, task: SampleTask) -> RangeSamples:
        return self.ranges.run(part, deepcopy(task))


def test_each_shape_is_planned_by_one_device(monkeypatch):
    planned = []

    def counted(model: Any, position: Any, **how: Any) -> Any:
        planned.append(model.shard(position)["0"].shape[0])
        return plan_for(model, position, **how)

    monkeypatch.setattr(planned_model, "plan_for", counted)
    shards, request = _shards(3, 2, 4, 3, 2, 4, 5), _request({"reduce": "norm"})
    apart = [SampleRanges(_model(), _groups(shards), request, **SETTING) for _ in range(2)]
    found = split_samples(apart[-1], _Apart(apart), _parts(2, len(shards)), request)
    assert sorted(planned) == [2, 3, 4, 5]
    one = jacobian(_model(), shards, reduce="norm", **SETTING)
    assert (found.roads, found.samples) == (one.roads, one.samples)
    for name, norms in one.parameter_norms.items():
        torch.testing.assert_close(found.parameter_norms[name], norms, rtol=EXACT, atol=EXACT)


def test_a_plan_of_the_models_own_functions_stays_where_it_was_made():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 2 * x

        @staticmethod
        def backward(context, gradient):
            return 2 * gradient

    class Doubling(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, Doubled.apply(self.weight), self.bias)

    model = Doubling(4, 3).double()
    ranges = SampleRanges(model, _groups(SHARDS), _request({"reduce": "norm"}))
    whole = Range(0, 1, 0, len(SHARDS))
    assert ranges.plans(range(len(SHARDS)), of_others=False) == {}
    assert ranges.count([whole], {}, of_others=False) == [sum(SIZES)]


def test_shapes_are_shared_out_evenly_whoever_has_them():
    parts = [Range(0, 2, 0, 4), Range(1, 2, 4, 7)]
    assert share_out(parts, [["a", "b", "c", "d"], ["d", "d", "d"]]) == [[0, 2], [1, 3]]
    assert share_out(parts, [["a", "a", "a", "a"], ["a", "a", "b"]]) == [[0], [6]]
