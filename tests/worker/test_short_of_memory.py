"""A device that is short of memory drops models that the job does not need, and no others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradbox.protocol import JobState
from gradbox_service.database.connection import connect
from gradbox_service.jobs import JobRecord
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.device.entry import DeviceEntries
from gradbox_worker.exceptions_to_problems import wanted_bytes
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running_box, running_worker, shards_of

MIB, GIB = 2**20, 2**30
WEIGHTS_MIB = 64
# What a process may take beyond what it has: less than a job's scratch or a model, and more with
# the weights of one model that was dropped.
SLACK_MIB = 48
SCRATCH_MIB = {"small": 1, "other": 1, "large": 56, "absurd": 2**30}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("short")) as box:
        box.models_file.write_text(
            "".join(
                f'[models.{name}]\nbuilder = "python"\nsource = "{zoo.__file__}:large"\n'
                f"kwargs = {{weights_mib = {WEIGHTS_MIB}, scratch_mib = {scratch_mib}}}\n"
                for name, scratch_mib in SCRATCH_MIB.items()
            )
        )
        yield box


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    options = ["--model-memory-gib", str(10 * WEIGHTS_MIB * MIB / GIB), "--device", "cpu"]
    with running_worker(box, *options) as worker:
        yield worker


def run(box: Box, model: str) -> JobRecord:
    return box.wait(box.submit(box.spec(shards_of(2), model=model, wrt=["linear.*"])))


def is_out_of_memory(record: JobRecord) -> bool:
    return record.error is not None and record.error.code == "out-of-memory"


def on_device(box: Box) -> set[str]:
    """Return the models that are in the device's memory, as its process notes behind each job."""
    connection = connect(box.redis_url)
    (mark,) = connection.hkeys("gradbox:device:w1")
    entry = DeviceEntries(connection, "w1").read(mark.decode())
    assert entry is not None
    assert entry.memory is not None
    return set(entry.memory.models)


def taken_bytes(worker: WorkerProcess) -> int:
    """Return what the limit below counts."""
    lines = Path(f"/proc/{worker.child_pid}/status").read_text().splitlines()
    (data,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")]
    return data


def limit(worker: WorkerProcess, most_bytes: int) -> None:
    """Let the device process take so many bytes in all, as `ulimit -d` would."""
    resource.prlimit(worker.child_pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))


def test_a_job_larger_than_the_machine_drops_no_model(box: Box, worker: WorkerProcess) -> None:
    before = on_device(box)
    assert is_out_of_memory(run(box, "absurd"))
    assert on_device(box) == before


def test_a_job_has_the_model_dropped_that_was_used_least_lately(
    box: Box, worker: WorkerProcess
) -> None:
    first = run(box, "large")
    assert first.state is JobState.DONE, first.error
    expected, _ = box.result(first)
    for model in ("absurd", "small", "other"):
        run(box, model)
    before = on_device(box)
    assert before == set(SCRATCH_MIB)
    most_bytes = taken_bytes(worker) + SLACK_MIB * MIB
    limit(worker, most_bytes)
    again = run(box, "large")
    assert again.state is JobState.DONE, again.error
    assert on_device(box) == before - {"absurd"}
    found, _ = box.result(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # A model that does not fit has the next one dropped: "small" was used before "other".
    limit(worker, most_bytes - WEIGHTS_MIB * MIB)
    assert is_out_of_memory(run(box, "absurd"))
    assert on_device(box) == before - {"small"}
    assert run(box, "small").state is JobState.DONE


def test_a_job_beyond_its_own_limit_would_gain_nothing_from_dropped_models() -> None:
    cpu = torch.device("cpu")
    assert MemoryLimit(cpu).leaves_room_of_models()
    assert not MemoryLimit(cpu, job_bytes=SLACK_MIB * MIB).leaves_room_of_models()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 0),
    ],
)
def test_what_an_allocation_wanted_is_read_from_its_error(said: str, expected: int) -> None:
    error = RuntimeError("shard 3: the model")
    error.__cause__ = RuntimeError(said)
    assert wanted_bytes(error) == expected
