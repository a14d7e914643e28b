"""What a mixed gradient holds in memory: one shard's graph of G, and none in the tangent pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradbox_engine import Group, Objective, mixed_gradient
from tests.mixed_cases import cubic, penalty, vector

WIDTH = 32
SAMPLES = 64
ACTIVATION_BYTES = WIDTH * SAMPLES * 8


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


class PhaseMeter:
    """Begins to count anew when a phase begins."""

    def __init__(self, meter: LiveBytes) -> None:
        self.meter = meter
        self.peaks: dict[str, int] = {}
        self._phase = ""

    def step(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._base, self.meter.peak, self._phase = self.meter.live, self.meter.live, phase
        self.peaks[phase] = self.meter.peak - self._base


def deep(depth: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        return nn.Sequential(*layers, nn.Dropout(0.1)).double()


def peaks(depth: int, num_shards: int) -> dict[str, int]:
    y = vector(WIDTH).requires_grad_()
    shards = [{"0": torch.randn(SAMPLES, WIDTH, dtype=torch.float64)} for _ in range(num_shards)]
    with LiveBytes() as meter:
        observer = PhaseMeter(meter)
        mixed_gradient(
            deep(depth),
            Group("z", shards),
            Objective(cubic, {"y": y}, {"y": y}),
            Objective(penalty),
            mode="train",
            observer=observer,
        )
    return observer.peaks


def test_the_tangent_pass_does_not_grow_with_depth():
    found = {depth: peaks(depth, 2) for depth in (4, 16, 64)}
    assert abs(found[64]["replay"] - found[4]["replay"]) <= ACTIVATION_BYTES
    # The meter would see a graph: the first pass has one.
    assert found[64]["forward"] - found[4]["forward"] >= 50 * ACTIVATION_BYTES


def test_shards_are_kept_as_dfdz_and_some_entries_of_v():
    few, many = peaks(4, 2), peaks(4, 18)
    # What comes in is counted when it is first touched.
    z_dfdz_and_sketch = 3 * ACTIVATION_BYTES
    assert many["forward"] - few["forward"] <= 16 * z_dfdz_and_sketch
    assert many["replay"] <= few["replay"]


def test_the_tangent_pass_saves_nothing_of_the_model():
    saved: list[str] = []
    model = deep(3)
    phase = ""

    class Phases:
        def step(self, name: str, done: int, total: int) -> None:
            nonlocal phase
            phase = name

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, z: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                return self.model(z)

        def _pack(self, tensor: Tensor) -> Tensor:
            saved.append(phase)
            return tensor

    y = vector(WIDTH).requires_grad_()
    mixed_gradient(
        Watched(),
        Group("z", [{"z": torch.randn(2, WIDTH, dtype=torch.float64)} for _ in range(3)]),
        Objective(cubic, {"y": y}, {"y": y}),
        Objective(penalty),
        observer=Phases(),
    )
    assert set(saved) == {"forward"}
