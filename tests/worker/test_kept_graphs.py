"""What a device process keeps between the two halves of remote autograd, and when it lets go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox.protocol import CotangentsLoss, ForwardSpec, GradientSpec, JobSpec, TensorRef
from gradbox_worker.computations.execution import Execution, StopNow
from gradbox_worker.computations.kept_graphs import IDLE_S, KeptGraphs
from gradbox_worker.device import DeviceSettings
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from gradbox_worker.work import Finished, Stopped, Work
from tests.boxes import tensors_in
from tests.valkey import empty_backing
from tests.worker import zoo
from tests.worker.box import Box, receipt_at, register_misbehaving, shards_of

NUM_SHARDS = 3


class Silent:
    def step(self, phase: str, done: int, total: int) -> None: ...


class StopsAt:
    def __init__(self, phase: str) -> None:
        self._phase = phase

    def step(self, phase: str, done: int, total: int) -> None:
        if (phase, done) == (self._phase, 1):
            raise StopNow


class Device:
    """Runs jobs as the device process does, and looks at what it keeps meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.box = Box(folder, empty_backing(folder))
        register_misbehaving(self.box)
        with self.box.models_file.open("a") as file:
            file.write(f'[models.other]\nbuilder = "python"\nsource = "{zoo.__file__}:affine"\n')
        entries = read_models_file(self.box.models_file)
        self.registry = Registry(entries, device=torch.device("cpu"))
        self.now = 0.0
        self.kept = KeptGraphs(clock=lambda: self.now)
        self.versions: dict[str, str] = {}
        self._num_jobs = 0

    def run(self, spec: JobSpec, *, observer: Any = None, **given: Any) -> tuple[Work, Any]:
        self._num_jobs += 1
        if spec.model not in self.versions:
            self.versions[spec.model] = self.registry.get(spec.model).version
        work = Work(
            **{
                "job_id": f"{self._num_jobs:012x}",
                "attempt": 1,
                "model": spec.model,
                "model_version": self.versions[spec.model],
                "spec": spec,
                "spec_digest": "d",
                "result_path": self.box.folder / f"{self._num_jobs}.safetensors",
                "queued_s": 0.0,
                **given,
            }
        )
        answer = Execution(
            work=work,
            registry=self.registry,
            blobs=self.box.backing.blobs,
            kept=self.kept,
            observer=observer or Silent(),
        ).attempt()
        return work, answer

    def forward(self, *, seed: int = 0, retain: Any = "auto", **given: Any) -> Work:
        """Run a forward job of three shards to its end."""
        work, answer = self.run(self.spec("forward", retain=retain, seed=seed, **given))
        assert isinstance(answer, Finished), answer
        return work

    def gradient(self, forward: Work, **given: Any) -> tuple[int, int, dict[str, Tensor]]:
        """Run the second half; return the shards retained and replayed, and the gradients."""
        settled = {
            field: getattr(forward.spec, field)
            for field in set(ForwardSpec.model_fields) - {"computation", "returns", "retain"}
        }
        cotangents = self.box.upload({"z": torch.linspace(-1, 1, 24).reshape(12, 2)})
        tensors = {"z": TensorRef(blob=cotangents, tensor="z")}
        loss = CotangentsLoss(forward=forward.job_id, tensors=tensors)
        told = settled | {"computation": "gradient", "loss": loss, "returns": ["grads"]}
        path = given.pop("earlier_result", forward.result_path)
        observer = given.pop("observer", None)
        spec = GradientSpec(**(told | given))
        work, answer = self.run(spec, observer=observer, earlier_result=path)
        assert isinstance(answer, Finished), answer
        receipt = receipt_at(work.result_path)
        retained, replayed = receipt.shards_retained, receipt.shards_replayed
        assert retained is not None
        assert replayed is not None
        return retained, replayed, tensors_in(work.result_path)

    def spec(self, computation: str, **given: Any) -> Any:
        whole = self.box.spec(shards_of(NUM_SHARDS), **{"model": "m"} | self._only_shared(given))
        if computation == "gradient":
            return whole
        shared = whole.model_dump(exclude={"computation", "loss", "returns", "retain"})
        shared = {name: shared[name] for name in ForwardSpec.model_fields if name in shared}
        return ForwardSpec(computation="forward", **(shared | given))

    def _only_shared(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in ("retain", "returns")}


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_the_second_half_uses_the_graphs_and_uses_them_up(device: Device) -> None:
    forward = device.forward()
    assert device.kept.num_bytes > 0
    retained, replayed, grads = device.gradient(forward)
    assert (retained, replayed) == (NUM_SHARDS, 0)
    assert device.kept.num_bytes == 0
    retained, replayed, again = device.gradient(forward)
    assert (retained, replayed) == (0, NUM_SHARDS)
    assert_equal(grads, again)


def test_a_plain_forward_job_keeps_nothing(device: Device) -> None:
    assert device.spec("forward").retain == 0
    device.forward(retain=0)
    assert device.kept.idle_left_s() is None


def test_several_forward_jobs_wait_side_by_side_and_in_any_order(device: Device) -> None:
    passes = [
        device.forward(seed=1),
        device.forward(seed=2),
        device.forward(model="other"),
        device.forward(retain=0, seed=3),
    ]
    found = [device.gradient(forward) for forward in (passes[1], passes[3], passes[0], passes[2])]
    assert [retained for retained, _, _ in found] == [NUM_SHARDS, 0, NUM_SHARDS, NUM_SHARDS]


def test_the_newest_stay_within_the_bytes_of_retain(device: Device) -> None:
    first = device.forward()
    all_bytes = round(device.kept.num_bytes)
    second = device.forward(seed=1, retain=round(all_bytes * 1.5))
    assert device.kept.num_bytes <= all_bytes * 1.5
    assert device.gradient(second)[0] == NUM_SHARDS
    assert device.gradient(first)[:2] == (1, 2)


@pytest.mark.parametrize("given", [{"computation": "gradient"}, {"precision": "fp64"}], ids=str)
def test_another_job_lets_them_go(device: Device, given: dict[str, Any]) -> None:
    forward = device.forward()
    device.run(device.spec(**{"computation": "forward", **given}))
    assert device.kept.num_bytes == 0
    retained, replayed, grads = device.gradient(forward)
    assert (retained, replayed) == (0, NUM_SHARDS)
    assert_equal(grads, device.gradient(device.forward())[2])


def test_another_model_may_be_in_another_precision(device: Device) -> None:
    forward = device.forward()
    wide = device.forward(model="other", precision="fp64")
    assert device.gradient(forward)[0] == NUM_SHARDS
    assert device.gradient(wide)[0] == NUM_SHARDS


def test_a_model_that_has_to_be_loaded_lets_them_go_first(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.forward(model="other")
    del device.registry._loaded["other"]
    device.forward()
    assert device.kept.num_bytes > 0
    seen: list[float] = []
    load = Registry._load

    def watched(self: Registry, entry: Any) -> Any:
        seen.append(device.kept.num_bytes)
        return load(self, entry)

    monkeypatch.setattr(Registry, "_load", watched)
    device.forward(model="other", retain=0)
    assert seen == [0]


def test_a_stopped_forward_job_keeps_nothing(device: Device) -> None:
    spec = device.spec("forward", retain="auto")
    assert isinstance(device.run(spec, observer=StopsAt("forward"))[1], Stopped)
    assert device.kept.num_bytes == 0


def test_a_stopped_gradient_job_leaves_nothing(device: Device) -> None:
    forward = device.forward()
    with pytest.raises(AssertionError, match="Stopped"):
        device.gradient(forward, observer=StopsAt("replay"))
    assert device.kept.num_bytes == 0
    assert device.gradient(forward)[:2] == (0, NUM_SHARDS)


def test_a_failed_forward_job_keeps_nothing(device: Device) -> None:
    device.box.order("exit")
    answer = device.run(device.spec("forward", retain="auto"))[1]
    assert isinstance(answer, Caught)
    assert device.kept.num_bytes == 0


@pytest.mark.parametrize(
    "given",
    [
        {"earlier_result": Path("another-attempt.safetensors")},
        {"seed": 1},
        {"mode": "train"},
        {"wrt": ["linear.bias"]},
    ],
    ids=str,
)
def test_graphs_of_anything_else_are_not_used(device: Device, given: dict[str, Any]) -> None:
    forward = device.forward()
    if "earlier_result" in given:
        given["earlier_result"] = device.forward(retain=0).result_path
    assert device.gradient(forward, **given)[:2] == (0, NUM_SHARDS)


def test_they_go_after_a_while_without_jobs(device: Device) -> None:
    assert device.kept.idle_left_s() is None
    forward = device.forward()
    assert device.kept.idle_left_s() == IDLE_S
    device.now += IDLE_S / 2
    device.forward(seed=1)
    device.now += IDLE_S / 2
    assert device.kept.idle_left_s() == IDLE_S / 2
    device.now += IDLE_S
    assert device.kept.idle_left_s() == 0
    warm = WarmDevice(DeviceSettings(device.box.models_file, device.box.folder, device="cpu"))
    warm.kept = device.kept
    assert warm.rest() is None
    assert device.kept.num_bytes == 0
    assert device.gradient(forward)[0] == 0


@pytest.fixture
def crowded(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A model that finds no memory while anything is kept; what was kept at each of its calls."""
    seen: list[float] = []
    call: Callable[..., Tensor] = zoo.Affine.forward

    def forward(self: zoo.Affine, x: Tensor) -> Tensor:
        seen.append(device.kept.num_bytes)
        if seen[-1]:
            raise torch.OutOfMemoryError("no room")
        return call(self, x)

    module = device.registry.get("other").module
    monkeypatch.setattr(type(module), "forward", forward)
    return seen


def test_where_memory_runs_out_they_go_and_a_forward_job_begins_again(
    device: Device, crowded: Sequence[float]
) -> None:
    forward = device.forward()
    seen = len(crowded)
    device.forward(model="other", retain=0)
    assert [num_bytes > 0 for num_bytes in crowded[seen:]] == [True] + NUM_SHARDS * [False]
    assert device.gradient(forward)[:2] == (0, NUM_SHARDS)


def test_where_memory_runs_out_they_go_and_a_gradient_job_begins_again(
    device: Device, crowded: Sequence[float]
) -> None:
    other = device.forward(model="other", retain=0)
    expected = device.gradient(other)
    device.forward()
    seen = len(crowded)
    retained, replayed, grads = device.gradient(other)
    assert [num_bytes > 0 for num_bytes in crowded[seen:]] == [True] + NUM_SHARDS * [False]
    assert (retained, replayed) == (0, NUM_SHARDS)
    assert_equal(grads, expected[2])
