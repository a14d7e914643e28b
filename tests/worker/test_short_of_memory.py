"""A device that is short of memory drops models that the job does not need, and no others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.device import DeviceProcess
from gradbox_worker.exceptions_to_problems import wanted_bytes
from gradbox_worker.work import Failed, Finished, Outcome, Work
from tests.boxes import tensors_in
from tests.worker import zoo
from tests.worker.box import Box, shards_of
from tests.worker.devices import Watching, box_in, device_of

MIB = 2**20
WEIGHTS_MIB = 64
# What a process may take beyond what it has: less than a job's scratch or a model, and more with
# the weights of one model that was dropped.
SLACK_MIB = 48
SCRATCH_MIB = {"small": 1, "other": 1, "large": 56, "absurd": 2**30}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    box = box_in(tmp_path_factory.mktemp("short"))
    box.models_file.write_text(
        "".join(
            f'[models.{name}]\nbuilder = "python"\nsource = "{zoo.__file__}:large"\n'
            f"kwargs = {{weights_mib = {WEIGHTS_MIB}, scratch_mib = {scratch_mib}}}\n"
            for name, scratch_mib in SCRATCH_MIB.items()
        )
    )
    return box


@pytest.fixture(scope="module")
def device(box: Box) -> Iterator[DeviceProcess]:
    device = device_of(box, model_memory_bytes=10 * WEIGHTS_MIB * MIB)
    device.ensure()
    yield device
    device.close()


def run(box: Box, device: DeviceProcess, model: str) -> Outcome:
    (version,) = [view.version for view in device.models if view.name == model]
    work = Work(
        job_id=model,
        attempt=1,
        model=model,
        model_version=version,
        spec=box.spec(shards_of(2), model=model, wrt=["linear.*"]),
        spec_digest="d",
        result_path=result_of(box, model),
        queued_s=0.0,
    )
    return device.run(work, Watching())


def result_of(box: Box, model: str) -> Path:
    return box.folder / "results" / f"{model}.1.safetensors"


def on_device(device: DeviceProcess) -> set[str]:
    assert device.memory is not None
    return set(device.memory.models)


def taken_bytes(device: DeviceProcess) -> int:
    """Return what the limit below counts."""
    lines = Path(f"/proc/{device.pid}/status").read_text().splitlines()
    (data,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")]
    return data


def limit(device: DeviceProcess, most_bytes: int) -> None:
    """Let the process take so many bytes in all, as `ulimit -d` would."""
    assert device.pid is not None
    resource.prlimit(device.pid, resource.RLIMIT_DATA, (most_bytes, most_bytes))


def test_a_job_larger_than_the_machine_drops_no_model(box: Box, device: DeviceProcess) -> None:
    before = on_device(device)
    outcome = run(box, device, "absurd")
    assert isinstance(outcome, Failed)
    assert outcome.problem.code == "out-of-memory"
    assert on_device(device) == before


def test_a_job_has_the_model_dropped_that_was_used_least_lately(
    box: Box, device: DeviceProcess
) -> None:
    assert isinstance(run(box, device, "large"), Finished)
    expected = tensors_in(result_of(box, "large"))
    for model in ("absurd", "small", "other"):
        run(box, device, model)
    before = on_device(device)
    assert before == set(SCRATCH_MIB)
    most_bytes = taken_bytes(device) + SLACK_MIB * MIB
    limit(device, most_bytes)
    assert isinstance(run(box, device, "large"), Finished)
    assert on_device(device) == before - {"absurd"}
    found = tensors_in(result_of(box, "large"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # A model that does not fit has the next one dropped: "small" was used before "other".
    limit(device, most_bytes - WEIGHTS_MIB * MIB)
    assert isinstance(run(box, device, "absurd"), Failed)
    assert on_device(device) == before - {"small"}
    assert isinstance(run(box, device, "small"), Finished)


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
