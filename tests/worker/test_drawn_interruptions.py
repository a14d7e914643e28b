"""Jobs on models of random layers that are ended at random steps and go on from their files."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    Checkpoints,
    FirstOutputs,
    Group,
    Objective,
    Observer,
    Penalty,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import OtherShards, SampleResult, jacobian, per_sample_gradient
from gradbox_worker.computations.checkpoints import CheckpointFile, Pace
from tests.device import DEVICE, on_cpu_alone, same_bits
from tests.engine.drawn_models import NUM_OUTPUTS, WIDTH, DrawnModel, samples
from tests.engine.interrupted import Killed
from tests.mixed_cases import cubic, penalty

NUM_DRAWS: Final = 12
NUM_MORE: Final = 12  # in the slow suite
Run = Callable[[Observer, Checkpoints | None], Mapping[str, Any]]


class MovingModel(DrawnModel):
    """One of these models with batch norm and two averages, one of which it binds anew."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        momentum = self._of.choice([None, 0.3])
        self._norm = nn.BatchNorm1d(WIDTH, momentum=momentum, dtype=torch.float64)
        self.register_buffer("written", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("bound", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self._norm(x.flatten(0, 1)).view_as(x)
        if self.training:
            mean = h.detach().square().mean((0, 1))
            self.written.lerp_(mean, 0.3)
            self.bound = mean if self.bound is None else self.bound * mean
        return super().forward(h + self.written.clone())


class KilledAtStep:
    """Ends a job at a step of its, whatever phase that is of; -1 is no step."""

    def __init__(self, at: int) -> None:
        self.at, self.num_steps = at, 0

    def step(self, phase: str, done: int, total: int) -> None:
        self.num_steps += 1
        if self.num_steps == self.at + 1:
            raise Killed


class DueAtTimes(CheckpointFile):
    """The file of an attempt's checkpoints, which are due as chance has it."""

    def __init__(self, folder: Path, *, attempt: int, of: random.Random, chance: float) -> None:
        super().__init__(folder, job_id="j", attempt=attempt, identity=dict, pace=Pace.after(0))
        self._of, self._chance = of, chance

    def due(self) -> bool:
        return super().due() and self._of.random() < self._chance


def loss(z: Tensor, other: Tensor | None = None, *, shift: Tensor) -> Tensor:
    other = z if other is None else other
    return (z @ other.T + shift).logsumexp(1).mean()


def sizes(of: random.Random) -> list[int]:
    return [of.randint(2, 4) for _ in range(of.randint(2, 5))]


def shuffled(of: random.Random, number: int) -> list[int] | None:
    return of.sample(range(number), number) if of.random() < 0.3 else None


def gradient(of: random.Random, seed: int) -> Run:
    groups = []
    for name in ("z", "other")[: of.randint(1, 2)]:
        cut = sizes(of)
        groups.append(Group(name, samples(seed, cut), order=shuffled(of, sum(cut))))
    told: dict[str, Any] = {
        "mode": of.choice(["train", "train", "eval"]),
        "streams": of.choice(["shard", "sample"]),
        "wrt": of.choice([None, ["*", "inputs.0"], ["p0", "_norm.*"]]),
        "returns": ("grads", "buffers", "outputs", "cotangents", "input_grads"),
    }
    if of.random() < 0.4:
        scale = of.choice([None, lambda z: z.sum(1)])
        told["penalties"] = [Penalty("_dropout", lambda tap: tap.exp().mean(), 0.1, scale)]
    retains = of.choices([0, 4000, 10**9], k=2)

    def run(observer: Observer, checkpoints: Checkpoints | None) -> Mapping[str, Any]:
        shift = torch.ones((), dtype=torch.float64, requires_grad=True)
        found = set_gradient(
            MovingModel(seed).to(DEVICE),
            groups,
            Objective(loss, {"shift": shift}, {"shift": shift}),
            retain=retains[checkpoints is None],
            observer=observer,
            checkpoints=checkpoints,
            **told,
        )
        facts = ("loss", "grads", "unreached", "shards", "buffers", "outputs", "cotangents")
        return {name: getattr(found, name) for name in (*facts, "input_grads")}

    return run


def forward(of: random.Random, seed: int) -> Run:
    groups, mode = [Group("z", samples(seed, sizes(of)))], of.choice(["train", "eval"])

    def run(observer: Observer, checkpoints: Checkpoints | None) -> Mapping[str, Any]:
        model = MovingModel(seed).to(DEVICE)
        how: Any = {"mode": mode, "observer": observer, "checkpoints": checkpoints}
        found = set_outputs(model, groups, **how)
        return {name: getattr(found, name) for name in ("outputs", "rows", "buffers", "stateful")}

    return run


def at_cotangents(of: random.Random, seed: int) -> Run:
    groups, mode = [Group("z", samples(seed, sizes(of)))], of.choice(["train", "eval"])
    first = set_outputs(MovingModel(seed).to(DEVICE), groups, mode=mode)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    cotangents = {"z": {"": z.cos() * (torch.arange(len(z), device=DEVICE) % 3 > 0)[:, None]}}
    outputs = FirstOutputs({"z": {"": z}}, first.rows, first.stateful)

    def run(observer: Observer, checkpoints: Checkpoints | None) -> Mapping[str, Any]:
        model = MovingModel(seed).to(DEVICE)
        how: Any = {"mode": mode, "observer": observer, "checkpoints": checkpoints}
        found = gradient_at_cotangents(model, groups, cotangents, outputs, **how)
        return {"grads": found.grads, "unreached": found.unreached}

    return run


def told(result: SampleResult) -> Mapping[str, Any]:
    """Return all that a result says but its time; of factors, their tensors."""
    pieces = result.factors.pieces if result.factors else ()
    factors = [{name: term.tensors() for name, term in piece.items()} for piece in pieces]
    facts = ("arrays", "parameter_norms", "values", "other_values", "roads", "loops")
    facts += ("unreached", "names", "samples", "outputs")
    return {"factors": factors, **{fact: getattr(result, fact) for fact in facts}}


def rows(of: random.Random, seed: int) -> Run:
    shards, entry = samples(seed, sizes(of)), jacobian
    how: dict[str, Any] = {"reduce": of.choice(["none", "none", "norm", "gram", "projection"])}
    if how["reduce"] == "none":
        how["form"] = of.choice(["dense", "factored", "auto"])
    if how["reduce"] == "projection":
        how["dim"] = 3
    if how["reduce"] == "gram" and of.random() < 0.5:
        how["against"] = OtherShards(samples(seed + 1, [2, 1]))
    if of.random() < 0.5:
        entry = partial(per_sample_gradient, loss=lambda z: z.square().sum(1))
    how |= {"mode": of.choice(["train", "eval"]), "budget_bytes": of.choice([300, 2**30])}

    def run(observer: Observer, checkpoints: Checkpoints | None) -> Mapping[str, Any]:
        model = DrawnModel(seed).to(DEVICE)
        return told(entry(model, shards, observer=observer, checkpoints=checkpoints, **how))

    return run


def mixed(of: random.Random, seed: int) -> Run:
    cut, mode = sizes(of), of.choice(["train", "eval"])
    group = Group("z", samples(seed, cut), order=shuffled(of, sum(cut)))

    def run(observer: Observer, checkpoints: Checkpoints | None) -> Mapping[str, Any]:
        y = torch.linspace(-1, 1, NUM_OUTPUTS, dtype=torch.float64).requires_grad_()
        found = mixed_gradient(
            MovingModel(seed).to(DEVICE),
            group,
            Objective(cubic, {"y": y}, {"y": y}),
            Objective(penalty),
            mode=mode,
            returns=("dfdz",),
            observer=observer,
            checkpoints=checkpoints,
        )
        facts = ("value", "grads", "unreached", "tangents", "fallbacks", "dfdz")
        return {name: getattr(found, name) for name in facts}

    return run


JOBS: Final[Mapping[str, Callable[[random.Random, int], Run]]] = {
    "gradient": gradient,
    "forward": forward,
    "at cotangents": at_cotangents,
    "rows": rows,
    "mixed": mixed,
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return same_bits(found, expected)
    if isinstance(expected, Mapping):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@on_cpu_alone
@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_DRAWS),
        *(
            pytest.param(seed, marks=pytest.mark.slow)
            for seed in range(NUM_DRAWS, NUM_DRAWS + NUM_MORE)
        ),
    ],
)
@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_goes_on_from_its_file_says_the_same(
    tmp_path: Path, kind: str, seed: int
) -> None:
    of = random.Random(f"{kind} {seed}")
    run, whole = JOBS[kind](of, seed), KilledAtStep(-1)
    expected = run(whole, None)
    chance = of.choice([1.0, 0.6])
    ends = [*(of.randrange(whole.num_steps) for _ in range(of.randint(1, 3))), -1]
    for attempt, at in enumerate(ends, start=1):
        file = DueAtTimes(tmp_path, attempt=attempt, of=of, chance=chance)
        try:
            found = run(KilledAtStep(at), file)
        except Killed:
            continue
        assert same(found, expected), (ends, chance)
