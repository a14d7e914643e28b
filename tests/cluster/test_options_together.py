"""Options drawn at random, together: two devices return what one does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import Cotangents, Forward, GradClient, Gradient, GradResult, MixedGradient, Penalty
from tests.boxes import tensors_in
from tests.client.test_remote_programs import Program
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges
from tests.oracle import TOLERANCE

pytestmark = pytest.mark.slow

NUM_DRAWS = 24
IN_16_BITS = 5e-2  # beside the largest entry of all tensors, for some are sums that cancel
TAP, FIRST, LAST = "layers.0", "layers.0.*", "layers.4.bias"


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


def of_two(a: Tensor, b: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    return (a.mean(0) @ b.mean(0)).square() * scale + (a * target).square().sum() + b.exp().mean()


def of_one(z: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    return (z - z.mean(0)).square().sum() * scale + (z * target).sum().square()


def scaled(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return output * 2 + inputs["x"].mean()


class Drawn:
    """One draw of options."""

    def __init__(self, seed: int) -> None:
        self._of, self._numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        names = self._of.choice([["z"], ["a", "b"]])
        self.sizes = {
            n: [self._of.randint(2, 5) for _ in range(self._of.randint(2, 5))] for n in names
        }
        self.precision = self._of.choice(["fp32", "fp32", "fp32", "bf16", "fp64"])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._numbers)

    def some(self, **options: Any) -> dict[str, Any]:
        """Return about half of these."""
        return {name: value for name, value in options.items() if self._of.random() < 0.5}

    def forward(self) -> dict[str, Any]:
        """Return options of every computation in phases, for shards of `sizes`."""
        order = {n: torch.randperm(sum(s), generator=self._numbers) for n, s in self.sizes.items()}
        return {
            "model": "unhurried",
            "inputs": {n: [{"x": self.normal(b, 5)} for b in s] for n, s in self.sizes.items()},
            "mode": self._of.choice(["train", "train", "eval"]),
            "seed": self._of.randrange(9),
            "precision": self.precision,
            **self.some(
                streams="sample",
                order=order,
                readout=scaled,
                weights={LAST: self.normal(3)},
            ),
        }

    def gradient(self) -> dict[str, Any]:
        one = list(self.sizes) == ["z"]
        penalty = Penalty(
            at=TAP,
            loss=lambda tap: tap.square().mean(),
            weight=0.3,
            **self.some(per_sample_scale=lambda z: z.detach().square().sum(1)),
        )
        target = self.normal(sum(self.sizes["z" if one else "a"]), 3)
        returned = ["buffers", "outputs", "cotangents"]
        return {
            **self.forward(),
            "loss": of_one if one else of_two,
            "loss_inputs": {"scale": torch.tensor(0.7, requires_grad=True), "target": target},
            "returns": ("grads", *self._of.sample(returned, self._of.randint(0, 3))),
            **self.some(penalties=[penalty], retain=0, wrt=["inputs.*", FIRST], transfer="bf16"),
        }

    def cotangents(self, result: GradResult) -> dict[str, Tensor]:
        return {n: self.normal(*z.shape).to(z) for n, z in result.outputs.items()}

    def near(self, options: dict[str, Any]) -> float:
        in_16_bits = self.precision == "bf16" or options.get("transfer") == "bf16"
        return IN_16_BITS if in_16_bits else TOLERANCE


def assert_alike(results: list[GradResult], folder: Path, *, near: float) -> None:
    """Compare all that stands in the result files, the first one's with every other."""
    files = []
    for number, result in enumerate(results):
        path = folder / f"{number}.safetensors"
        result.save(path)
        tensors = tensors_in(path)
        tensors.pop("filler", None)  # aligns what a device writes, see docs/wire.md
        files.append(tensors)
    expected = files[0]
    largest = max(float(x.double().abs().max()) for x in expected.values() if x.numel())
    for found in files[1:]:
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            scale = float(wanted.double().abs().max()) if near == TOLERANCE else largest
            apart = float((found[name].double() - wanted.double()).abs().max())
            assert apart <= near * max(scale, 1.0), (name, apart, scale)


def both(client: GradClient, job: Callable[..., Any], **options: Any) -> list[GradResult]:
    one, two = (client.submit(job(**options, devices=n)).result(WAIT_S) for n in (1, 2))
    assert len(two.manifest.ranges or ()) == 2
    return [one, two]


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_a_set_gradient(client: GradClient, tmp_path: Path, seed: int) -> None:
    drawn = Drawn(seed)
    options = drawn.gradient()
    results = both(client, Gradient, **options)
    assert_alike(results, tmp_path, near=drawn.near(options))


@pytest.mark.parametrize("seed", range(NUM_DRAWS // 2))
def test_two_halves(client: GradClient, tmp_path: Path, seed: int) -> None:
    drawn = Drawn(seed)
    options = {**drawn.forward(), **drawn.some(retain="auto", wrt=[FIRST])}
    forwards = both(client, Forward, returns=("outputs", "buffers"), **options)
    (tmp_path / "forward").mkdir()
    assert_alike(forwards, tmp_path / "forward", near=drawn.near(options))
    given = drawn.cotangents(forwards[0])
    found = [
        client.submit(Gradient(loss=Cotangents(given, of=half), devices=n)).result(WAIT_S)
        for half in forwards
        for n in (1, 2)
    ]
    assert_alike(found, tmp_path, near=drawn.near(options))


@pytest.mark.parametrize("seed", range(NUM_DRAWS // 2))
def test_a_mixed_gradient(client: GradClient, tmp_path: Path, seed: int) -> None:
    drawn = Drawn(seed)
    drawn.sizes = {"z": next(iter(drawn.sizes.values()))}
    options = drawn.forward()
    given = {"returns": ("grads", "dfdz"), "y": {"y": drawn.normal(3)}}
    results = both(
        client,
        MixedGradient,
        inner=lambda y, v: (v.tanh() * y).square().sum(),
        outer=lambda dfdz: dfdz.square().sum(),
        **given,
        **options,
    )
    assert_alike(results, tmp_path, near=drawn.near(options))


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_a_program_with_a_remote_model(client: GradClient, seed: int) -> None:
    Program(client, seed, devices="auto").run()
