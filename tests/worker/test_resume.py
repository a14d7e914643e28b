"""A long job whose device, worker or box is killed goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from gradbox.protocol import (
    GraphLoss,
    InputGroup,
    JacobianSpec,
    JobSpec,
    JobState,
    MixedGradientSpec,
    PerSampleGradientSpec,
    ShardRef,
    StoreRowsSpec,
    StoreSpec,
    TensorRef,
    TracedFunction,
)
from gradbox.results.factors import FACTORS, read_factors
from gradbox.tensors.safetensors_header import read_header
from gradbox.tracing.trace import trace
from gradbox_service.jobs import JobRecord
from gradbox_service.stores import StoreRecord
from gradbox_worker.computations.checkpoints import METADATA_KEY, checkpoint_path
from tests.worker.box import Box, WorkerProcess, shards_of

NUM_SHARDS = 60
KILLED_AT = 50
MAX_PLAN_CALLS = 10  # that a per-sample job makes before and beside its shards


class ResumeBox:
    """The shared box, whose worker keeps a checkpoint after every shard."""

    def __init__(self, box: Box, living_worker: Callable[[], WorkerProcess]) -> None:
        self.box = box
        self.living_worker = living_worker
        self.expected: dict[str, dict[str, Tensor]] = {}

    def kill_at_call(self, worker: WorkerProcess, number: int, *, device: bool) -> None:
        """Kill the worker, or its device alone, in a call of the model."""
        deadline = time.monotonic() + 120
        while self.num_calls() < number:
            assert time.monotonic() < deadline, "the job never came so far"
            time.sleep(0.01)
        if device:
            os.kill(worker.child_pid, signal.SIGKILL)
        else:
            worker.stop(signal.SIGKILL)

    def hold_at_call(self, number: int) -> None:
        """Have the next job's model wait in a call."""
        (self.box.folder / "calls").unlink(missing_ok=True)
        (self.box.folder / "hold").write_text(str(number))
        self.box.order("hold_at_a_call")

    def num_calls(self) -> int:
        calls = self.box.folder / "calls"
        return calls.stat().st_size if calls.exists() else 0

    def checkpoints(self, job: str) -> list[str]:
        return [path.name for path in (self.box.folder / "checkpoints").glob(f"{job}*")]

    def wait_until_nothing_is_kept(self, job: str) -> None:
        """Files go right after the record has changed."""
        deadline = time.monotonic() + 60
        while self.checkpoints(job):
            assert time.monotonic() < deadline, self.checkpoints(job)
            time.sleep(0.01)

    def facts(self, job: str) -> dict[str, Any]:
        """Return the JSON values of the job's last checkpoint."""
        with safe_open(checkpoint_path(self.box.folder / "checkpoints", job), "pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])["facts"]
            return facts


@pytest.fixture(scope="module")
def resuming(box: Box, living_worker: Callable[[], WorkerProcess]) -> ResumeBox:
    return ResumeBox(box, living_worker)


def squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def inner(y: Tensor, v: Tensor) -> Tensor:
    return (v.tanh() @ y).square().sum()


def outer(dfdz: Tensor) -> Tensor:
    return dfdz.square().sum()


def traced(function: Callable[..., Tensor], *arguments: str) -> TracedFunction:
    given: dict[str, Any] = {"arguments": arguments} if arguments else {"positional": 1}
    return TracedFunction(graph=trace(function, **given).graph)


def shared(box: Box) -> dict[str, Any]:
    refs = [ShardRef(blob=box.upload(shard)) for shard in shards_of(NUM_SHARDS)]
    return {"model": "m", "inputs": [InputGroup(shards=refs)], "mode": "train"}


def gradient(box: Box) -> JobSpec:
    return box.spec(shards_of(NUM_SHARDS), mode="train", retain=0)


def in_fp16(box: Box) -> JobSpec:
    return box.spec(shards_of(NUM_SHARDS), mode="train", retain=0, precision="fp16")


def rows(box: Box, **how: Any) -> JobSpec:
    loss = GraphLoss(function=traced(squares))
    given = {"computation": "per_sample_gradient", "loss": loss, **shared(box), **how}
    return PerSampleGradientSpec(**given)


def jacobian(box: Box, **how: Any) -> JobSpec:
    return JacobianSpec(**{"computation": "jacobian", **shared(box), **how})


def mixed(box: Box) -> JobSpec:
    y = torch.linspace(-1, 1, 2)
    leaf = TensorRef(blob=box.upload({"y": y}), tensor="y", requires_grad=True)
    return MixedGradientSpec(
        computation="mixed_gradient",
        **shared(box),
        inner=traced(inner, "y", "v"),
        outer=traced(outer),
        y={"y": leaf},
    )


def appended(box: Box) -> JobSpec:
    """Return a job that appends to a store of its own."""
    store = StoreRecord(
        id=uuid.uuid4().hex,
        owner="alice",
        spec=StoreSpec(name=uuid.uuid4().hex, model="m"),
        model="m",
        model_version="",
        created_s=time.time(),
        used_s=time.time(),
    )
    box.backing.stores.create(store)
    ids = torch.arange(sum(len(*shard.values()) for shard in shards_of(NUM_SHARDS)))
    return StoreRowsSpec(
        computation="store_rows",
        **shared(box),
        loss=GraphLoss(function=traced(squares)),
        reduce="projection",
        kind="per_layer",
        dim=3,
        store=store.id,
        row_dtype="fp16",
        ids=TensorRef(blob=box.upload({"ids": ids}), tensor="ids"),
    )


@dataclass(frozen=True)
class Kind:
    """A job, how often it calls the model before its last phase, and how to count its shards."""

    spec: Callable[[Box], JobSpec]
    calls_before: int
    num_done: Callable[[dict[str, Any]], int]


def of_replay(spec: Callable[[Box], JobSpec]) -> Kind:
    return Kind(spec, NUM_SHARDS, lambda facts: int(facts["second"]["done"]))


def of_rows(spec: Callable[..., JobSpec], **how: Any) -> Kind:
    return Kind(lambda box: spec(box, **how), 0, lambda facts: int(facts["facts"]["shards"]))


KINDS: Mapping[str, Kind] = {
    "gradient": of_replay(gradient),
    "gradient in fp16": of_replay(in_fp16),
    "dense rows": of_rows(rows, form="dense"),
    "factors": of_rows(jacobian, form="factored"),
    "dense jacobian": of_rows(jacobian, form="dense"),
    "gram": of_rows(rows, reduce="gram"),
    "rows of a store": of_rows(appended),
    "mixed gradient": Kind(mixed, NUM_SHARDS, lambda facts: int(facts["second"]["num_done"])),
}


def arrays(box: Box, record: JobRecord) -> dict[str, Tensor]:
    """Return a result's tensors; of factors the arrays of their terms.

    Which terms share a tensor of the file depends on where the job was interrupted.
    """
    found, receipt = box.result(record)
    header = read_header(box.backing.results.on_disk(record.id, attempt=record.attempt))
    if FACTORS not in header.metadata:
        return found
    factors = read_factors(
        header.metadata[FACTORS],
        found.__getitem__,
        stored=header.tensors,
        names=receipt.names,
        samples=receipt.samples,
        outputs=receipt.outputs,
    )
    own = {name: tensor for name, tensor in found.items() if not name.startswith("factors/")}
    return own | {name: factors.block(name) for name in factors.names}


def undisturbed(resuming: ResumeBox, name: str) -> dict[str, Tensor]:
    """Return what the job returns where nothing happens."""
    if name not in resuming.expected:
        box = resuming.box
        (box.folder / "order").unlink(missing_ok=True)
        record = box.wait(box.submit(KINDS[name].spec(box)))
        assert record.state is JobState.DONE, record.error
        resuming.expected[name] = arrays(box, record)
    return resuming.expected[name]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "killed"),
    [
        ("gradient", "device"),
        pytest.param("gradient", "worker", marks=SLOW),
        pytest.param("gradient in fp16", "device", marks=SLOW),
        pytest.param("dense rows", "device", marks=SLOW),  # those of a store are dense, too
        pytest.param("dense rows", "worker", marks=SLOW),
        ("rows of a store", "device"),
        pytest.param("dense jacobian", "device", marks=SLOW),
        pytest.param("factors", "device", marks=SLOW),
        pytest.param("factors", "worker", marks=SLOW),
        pytest.param("gram", "device", marks=SLOW),
        pytest.param("mixed gradient", "device", marks=SLOW),
        pytest.param("mixed gradient", "worker", marks=SLOW),
    ],
)
def test_a_killed_job_goes_on_from_its_checkpoint(
    resuming: ResumeBox, worker: WorkerProcess, name: str, killed: str
) -> None:
    kind = KINDS[name]
    expected = undisturbed(resuming, name)
    box = resuming.box
    call = kind.calls_before + KILLED_AT
    resuming.hold_at_call(call)
    job = box.submit(kind.spec(box))
    resuming.kill_at_call(worker, call, device=killed == "device")
    num_done = kind.num_done(resuming.facts(job))
    resuming.living_worker()
    record = box.wait(job)
    assert record.state is JobState.DONE, record.error
    found, (_, receipt) = arrays(box, record), box.result(record)
    assert (receipt.attempts, receipt.resumed) == (2, 1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # The call in which it was killed, and those behind it.
    assert num_done >= KILLED_AT - 1 - MAX_PLAN_CALLS
    assert 0 <= resuming.num_calls() - call - (NUM_SHARDS - num_done) <= MAX_PLAN_CALLS
    resuming.wait_until_nothing_is_kept(job)


@pytest.mark.slow
def test_a_job_is_resumed_as_often_as_it_is_killed(
    resuming: ResumeBox, worker: WorkerProcess
) -> None:
    expected = undisturbed(resuming, "dense rows")
    box = resuming.box
    resuming.hold_at_call(30)
    job = box.submit(rows(box, form="dense"))
    resuming.kill_at_call(worker, 30, device=True)
    first = resuming.facts(job)["facts"]["shards"]
    resuming.hold_at_call(25)
    resuming.kill_at_call(worker, 25, device=True)
    assert resuming.facts(job)["facts"]["shards"] > first
    record = box.wait(job)
    assert record.state is JobState.DONE, record.error
    found, receipt = box.result(record)
    assert (receipt.attempts, receipt.resumed) == (3, 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    resuming.wait_until_nothing_is_kept(job)


@pytest.mark.parametrize("name", ["gradient", "dense rows"])
def test_a_cancelled_job_leaves_no_checkpoint(
    resuming: ResumeBox, worker: WorkerProcess, name: str
) -> None:
    box, kind = resuming.box, KINDS[name]
    call = kind.calls_before + KILLED_AT
    resuming.hold_at_call(call)
    job = box.submit(kind.spec(box))
    while resuming.num_calls() < call:
        assert not box.record(job).state.final
        time.sleep(0.01)
    assert resuming.checkpoints(job)
    box.cancel(job)
    box.order("dawdle")
    (box.folder / "hold").unlink()
    assert box.wait(job).state is JobState.CANCELLED
    resuming.wait_until_nothing_is_kept(job)
    assert not list((box.folder / "results").glob(f"{job}.*"))
