"""Which devices of a cluster a job gets; without Ray."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradbox import Gradient, Jacobian
from gradbox.protocol import CotangentsLoss, JobSpec, TensorRef
from gradbox_worker.cluster.head import ROWS_BYTES, ClusterDevices, Slot

SHARDS = [torch.zeros(2, 5)] * 4


class Named(ClusterDevices):
    """Devices without processes."""

    def __init__(self, *slots: Slot) -> None:
        self.changed = threading.Condition()
        self._slots = {slot.name: slot for slot in slots}
        self._ran = OrderedDict()

    def names(self, job_id: str, spec: JobSpec | None, *, model: str = "mlp") -> list[str]:
        record: Any = SimpleNamespace(id=job_id, model=model)
        return [slot.name for slot in self.name(record, spec)]

    def end(self, *names: str) -> None:
        for name in names:
            self._slots[name].state, self._slots[name].idle_since = "idle", time.monotonic()


def slot(name: str, *, here: bool = True, sees_files: bool = True, **given: Any) -> Slot:
    described: Any = SimpleNamespace(sees_files=sees_files)
    announcer: Any = None
    facts = {"state": "idle", "described": described, **given}
    return Slot(name, "cpu", "node", here, {}, announcer, **facts)


def gradient(devices: Any = 1, num_shards: int = 4) -> JobSpec:
    job = Gradient(model="mlp", inputs=SHARDS[:num_shards], loss=lambda z: z.sum(), devices=devices)
    return job.prepare().spec


def at_cotangents_of(job_id: str, devices: Any = 1) -> JobSpec:
    tensors = {"z": TensorRef(blob="0" * 64, tensor="z")}
    loss = CotangentsLoss(forward=job_id, tensors=tensors)
    return gradient(devices).model_copy(update={"loss": loss})


def test_a_job_takes_what_is_idle_up_to_what_it_asks_for() -> None:
    devices = Named(slot("a"), slot("b", state="busy"), slot("c"), slot("d"))
    assert devices.names("1", gradient(2)) == ["a", "c"]
    assert devices.names("2", gradient("auto")) == ["d"]


@pytest.mark.parametrize("spec", [gradient("auto", num_shards=1), gradient(1), None])
def test_what_cannot_be_split_takes_one(spec: JobSpec | None) -> None:
    assert Named(slot("a"), slot("b")).names("1", spec) == ["a"]


def test_a_job_takes_no_more_devices_than_it_has_shards_of_its_own() -> None:
    job = Jacobian(model="mlp", inputs={"x": SHARDS[:2], "y": SHARDS}, reduce="gram", against="y")
    spec = job.prepare().spec.model_copy(update={"devices": "auto"})
    assert len(Named(*(slot(name) for name in "abc")).names("1", spec)) == 2


def test_a_query_takes_a_device_for_so_many_bytes_of_rows_if_that_sees_them() -> None:
    def names(num_bytes: int, spec: JobSpec) -> list[str]:
        slots = slot("a"), slot("b"), slot("c", here=False, sees_files=False)
        record: Any = SimpleNamespace(id="1", model="mlp")
        return [found.name for found in Named(*slots).name(record, spec, rows_bytes=num_bytes)]

    for num_bytes, taken in ((0, 1), (ROWS_BYTES, 1), (2 * ROWS_BYTES, 2), (9 * ROWS_BYTES, 2)):
        assert len(names(num_bytes, gradient("auto", num_shards=1))) == taken
    assert len(names(9 * ROWS_BYTES, gradient(1))) == 1
    assert len(names(9 * ROWS_BYTES, gradient("auto", num_shards=3))) == 3


def test_the_first_device_is_of_the_boxs_machine_then_sees_its_files() -> None:
    far, sees = slot("a", here=False, sees_files=False), slot("b", here=False)
    assert Named(far, sees, slot("c")).names("1", gradient("auto")) == ["c", "b", "a"]


def test_among_equals_come_those_with_the_model_then_those_that_were_idle_longest() -> None:
    devices = Named(slot("a", idle_since=3.0), slot("b", idle_since=1.0), slot("c", idle_since=2.0))
    devices._slots["c"].models = ["mlp"]
    assert devices.names("1", gradient("auto")) == ["c", "b", "a"]


def test_a_job_at_cotangents_follows_its_forward_job() -> None:
    devices = Named(*(slot(name) for name in "abc"))
    assert devices.names("f", gradient(2)) == ["a", "b"]
    devices.end("a", "b")
    assert devices.names("g", at_cotangents_of("f", 2)) == ["a", "b"]
    devices.end("a", "b")
    assert len(devices.names("h", at_cotangents_of("f"))) == 1  # it may not have so many


def test_a_call_on_one_device_stays_on_one() -> None:
    devices = Named(slot("a"), slot("b", state="busy"))
    assert devices.names("f", gradient(2)) == ["a"]
    devices.end("a", "b")
    assert devices.names("g", at_cotangents_of("f", 2)) == ["a"]


def test_a_job_waits_a_moment_for_devices_that_end_another_one() -> None:
    devices = Named(slot("a"), slot("b", state="ending"))

    def ends() -> None:
        with devices.changed:
            devices.end("b")
            devices.changed.notify_all()

    timer = threading.Timer(0.1, ends)
    timer.start()
    assert sorted(devices.names("1", gradient("auto"))) == ["a", "b"]
    timer.join()


def test_a_job_for_one_device_waits_for_none_that_ends() -> None:
    began_s = time.monotonic()
    assert Named(slot("a"), slot("b", state="ending")).names("1", gradient()) == ["a"]
    assert time.monotonic() - began_s < 0.5
