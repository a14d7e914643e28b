"""What a job may ask for works the same in ranges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadInputs, BadOutput, Group, Objective, Penalty, set_gradient
from gradbox_engine.ranges import Range, cut
from gradbox_engine.set_loss import held_job
from tests import case_models
from tests.cases import CASES, spread
from tests.device import DEVICE, same_bits
from tests.engine.ranges.running import EXACT, even, in_ranges, on_devices, same_result
from tests.engine.replay.running import answer, question
from tests.oracle import difference


def _square(tap: Tensor) -> Tensor:
    return tap.square().mean()


TERMS = {
    "penalties": {
        "penalties": [
            Penalty("1", _square, 0.3, lambda z: z.flatten(1).sum(1).sigmoid()),
            Penalty("3", _square, -0.5),
        ]
    },
    "gradients of inputs": {"wrt": ["*", "inputs.0"]},
    "weights": {"weights": {"0.bias": torch.linspace(-1, 1, 4).double()}},
    "everything kept": {"retain": 10**9},
    "half of it kept": {"retain": 20_000},
    "automatic retention": {"retain": "auto"},
    "float64": {"precision": "fp64"},
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_a_job_give_the_gradient_of_one_device(name):
    terms = TERMS[name] | {"returns": ("grads", "outputs", "cotangents")}
    found, _ = on_devices(CASES["cnn in train"](), 3, **terms)
    one = answer(CASES["cnn in train"](), **terms)
    assert found.loss == one.loss
    assert difference(found.grads, one.grads) <= EXACT
    assert same_bits(found.outputs["z"], one.outputs["z"])
    assert same_bits(found.cotangents["z"], one.cotangents["z"])
    for wanted, shards in (one.input_grads or {}).get("z", {}).items():
        pairs = zip(found.input_grads["z"][wanted], shards, strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


def test_samples_in_another_order_with_streams_of_their_own():
    tokens = torch.randint(0, 11, (12, 5), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    shards = [{"tokens": rows} for rows in tokens.split([5, 1, 4, 2])]
    groups = [Group("z", shards, order=order)]

    def loss(z: Tensor) -> Tensor:
        return (z.sum((1, 2)) * torch.arange(12)).square().mean()

    told = {"mode": "train", "streams": "sample", "seed": 5, "output": "hidden"}
    model = case_models.transformer()
    one = set_gradient(model, groups, Objective(loss), **told)
    found = set_gradient(model, groups, Objective(loss), ranges=even(groups, 3), **told)
    assert difference(found.grads, one.grads) <= EXACT
    assert found.loss == one.loss


def test_parameters_of_the_loss_may_be_named():
    wrt = ["inputs.texts.*", "loss.log_scale"]
    found = in_ranges(CASES["two towers"](), 2, wrt=wrt)
    assert difference(found.grads, answer(CASES["two towers"](), wrt=wrt).grads) <= EXACT


@pytest.mark.parametrize("costs", [[1, 1, 1, 1, 1], [9, 1, 1, 1, 9]])
def test_a_range_may_end_within_a_group(costs):
    groups, objective, told = question(CASES["two towers"]())
    found = set_gradient(
        CASES["two towers"]().model().to(DEVICE), groups, objective, ranges=cut(costs, 2), **told
    )
    assert difference(found.grads, answer(CASES["two towers"]()).grads) <= EXACT


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_adds_unscaled_sums(precision):
    terms = {"precision": precision, "retain": 0}
    case = CASES["mlp"]()
    float_case = type(case)(
        lambda: CASES["mlp"]().model().float(),
        {"z": [{"0": shard["0"].float()} for shard in case.groups["z"]]},
        # Cotangents of the ranges differ by orders of magnitude, and so do their scales.
        lambda z: (z.double() * torch.logspace(0, -9, len(z))[:, None]).square().sum(),
    )
    found, _ = on_devices(float_case, 3, **terms)
    one = answer(float_case, **terms)
    assert difference(found.grads, one.grads) <= 2e-2
    assert same_result(found, in_ranges(float_case, 3, **terms))


def test_shards_without_a_cotangent_are_not_replayed():
    groups, _, told = question(CASES["mlp"]())
    objective = Objective(lambda z: z[:4].square().sum())
    model = CASES["mlp"]().model().to(DEVICE)
    found = set_gradient(model, groups, objective, ranges=even(groups, 3), **told)
    one = set_gradient(model, groups, objective, **told)
    assert (found.retained + found.replayed, found.unreached) == (1, one.unreached)
    assert difference(found.grads, one.grads) <= EXACT


def test_a_device_reads_only_the_shards_of_its_range():
    case = CASES["two towers"]()
    groups, objective, told = question(case)
    parts, names = even(groups, 2), tuple(objective.parameters)
    del told["returns"]
    for part in parts:
        model = case.model().to(DEVICE)
        mine = _with_the_shards_of(part, groups)
        with (
            held_job(model, groups, loss_parameters=names, **told) as whole,
            held_job(case.model().to(DEVICE), mine, loss_parameters=names, **told) as job,
        ):
            expected, found = whole.forward(part), job.forward(part)
        assert found.rows == expected.rows
        for group, named in expected.outputs.items():
            assert same_bits(found.outputs[group][""], named[""])


def test_numbers_of_samples_are_known_without_the_others():
    groups = [Group("z", [{"0": rows} for rows in torch.ones(9, 5).double().split([4, 2, 3])])]
    part = even(groups, 3)[2]
    told = {"mode": "train", "streams": "sample"}
    model = case_models.inplace_mlp().to(DEVICE)
    with held_job(model, groups, **told) as whole:
        expected = whole.forward(part).outputs["z"][""]
    with held_job(model, _with_the_shards_of(part, groups), **told) as job:
        assert same_bits(job.forward(part).outputs["z"][""], expected)


class _RunsOut(nn.Module):
    """Finds no memory in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return self.linear(x).tanh()


def test_graphs_of_one_range_give_way_to_the_next():
    groups = [Group("z", [{"0": torch.full((2, 5), 0.1 * i).double()} for i in range(4)])]
    parts, objective = even(groups, 2), Objective(spread)
    model = _RunsOut().to(DEVICE)
    found = set_gradient(model, groups, objective, ranges=parts, retain=10**9)
    assert (found.retained, found.replayed) == (1, 3)  # the last one's, which is used next
    one = set_gradient(model, groups, objective)
    assert difference(found.grads, one.grads) <= EXACT


def _with_the_shards_of(part: Range, groups: Sequence[Group]) -> list[Group]:
    """Return groups whose other shards have no numbers."""
    numbers = itertools.count()
    return [
        Group(
            group.name,
            [
                shard
                if part.start <= next(numbers) < part.stop
                else {name: tensor.to("meta") for name, tensor in shard.items()}
                for shard in group.shards
            ],
            method=group.method,
        )
        for group in groups
    ]


def test_ranges_agree_on_the_shape_of_z():
    shards = [{"0": torch.zeros(2, 5).double()}, {"0": torch.zeros(2, 3, 5).double()}]
    groups = [Group("z", shards)]
    with pytest.raises(BadOutput, match=r"group 'z'.* from shard 1 and .* from shard 0"):
        set_gradient(CASES["mlp"]().model(), groups, Objective(spread), ranges=even(groups, 2))


def test_names_of_the_loss_are_its_own():
    groups, _, told = question(CASES["mlp"]())
    objective = Objective(spread, parameters={"0.bias": torch.nn.Parameter(torch.zeros(1))})
    with pytest.raises(BadInputs, match=r"0\.bias"):
        set_gradient(
            CASES["mlp"]().model().to(DEVICE), groups, objective, ranges=even(groups, 2), **told
        )
