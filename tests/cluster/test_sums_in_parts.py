"""Sums of gradients that cross from device to device in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox_worker.cluster.actor.open_job import OpenJob
from gradbox_worker.cluster.coordinator import ray_devices
from gradbox_worker.cluster.coordinator.ray_devices import added_in_parts

SIZES = {"a": 5, "b": 0, "c": 300, "d": 1, "e": 40, "f": 40}


class _Holder(OpenJob):
    """What a device holds of a job after its replay, without the job."""

    def __init__(self, sums: dict[str, Tensor]) -> None:
        self._sums = {0: dict(sums)}

    @property
    def sums(self) -> dict[int, Any]:
        return self._sums

    def ask(self, calls: list[str]) -> Callable[..., Any]:
        def call(name: str, *arguments: Any) -> Any:
            calls.append(name)
            return getattr(self, name)(*arguments)

        return call


def _sums(names: str, *, seed: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {n: torch.randn(SIZES[n], generator=numbers, dtype=torch.float64) for n in names}


@pytest.mark.parametrize(("part_bytes", "parts"), [(2**26, 1), (2000, 2), (500, 7)])
def test_every_part_is_added_once(
    part_bytes: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_devices, "PART_BYTES", part_bytes)
    mine, others = _sums("abcd", seed=0), _sums("bcdef", seed=1)
    expected = {name: mine.get(name, 0) + others.get(name, 0) for name in SIZES}
    num_bytes = sum(tensor.nbytes for tensor in others.values())
    left, right, calls = _Holder(mine), _Holder(others), list[str]()
    added = added_in_parts(left.ask(calls), right.ask(calls), 0, 0, num_bytes=num_bytes)
    assert added == num_bytes
    assert calls == ["take_sums", "add"] * parts
    assert right.sums == {}
    assert left.sums[0].keys() == expected.keys()
    assert all(torch.equal(left.sums[0][name], expected[name]) for name in expected)
