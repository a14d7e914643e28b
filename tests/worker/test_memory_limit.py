"""What a job may allocate is limited by the kernel, so no graph takes the machine's memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gradbox.protocol import JobState
from gradbox_engine import host_memory
from gradbox_engine.host_memory import available_bytes, private_bytes
from gradbox_worker.computations.memory_limit import RESERVE_BYTES, MemoryLimit
from tests.worker.box import (
    Box,
    WorkerProcess,
    shards_of,
    traced,
)

MIB = 2**20
NUM = 2**28  # of entries that an expanded tensor seems to have: 1 GiB of float32
SIDE = 2**14


def kthvalue(z: Tensor) -> Tensor:
    return z.sum().expand(NUM).kthvalue(5)[0]


def median(z: Tensor) -> Tensor:
    return z.sum().expand(NUM).median()


def sort(z: Tensor) -> Tensor:
    return z.sum().expand(NUM).sort()[0][0]


def mv(z: Tensor) -> Tensor:
    return torch.mv(z.sum().expand(SIDE, SIDE), torch.ones(SIDE)).sum()


def matmul(z: Tensor) -> Tensor:
    return (z.sum().expand(SIDE, SIDE) @ torch.ones(SIDE, 2)).sum()


def conv(z: Tensor) -> Tensor:
    return F.conv1d(z.sum().expand(1, SIDE, SIDE), torch.ones(1, SIDE, 1)).sum()


def backward_of_an_index(z: Tensor) -> Tensor:
    return z.sum().expand(NUM)[0]


@pytest.mark.parametrize(
    "attack",
    [kthvalue, median, sort, mv, matmul, conv, backward_of_an_index],
    ids=lambda attack: attack.__name__,
)
def test_a_graph_whose_kernels_take_more_than_a_job_may_is_out_of_memory(
    box: Box, worker: WorkerProcess, attack: Callable[[Tensor], Tensor]
) -> None:
    assert box.wait(box.submit(box.spec(shards_of(2)))).state is JobState.DONE  # loads the model
    device, loads = worker.child_pid, worker.device_log.count("loaded m (")
    record = box.wait(box.submit(box.spec(shards_of(2), loss=traced(attack))), timeout_s=60)
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert record.error is not None
    assert record.error.code == "out-of-memory", record.error
    assert box.wait(box.submit(box.spec(shards_of(2)))).state is JobState.DONE
    assert worker.child_pid == device
    assert worker.device_log.count("loaded m (") == loads


def test_a_job_gets_all_of_the_room_it_may_have() -> None:
    held = MemoryLimit(torch.device("cpu"), job_bytes=256 * MIB).held()
    with held:
        torch.ones(200 * MIB // 4).sum()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(4096 * MIB // 4)  # whatever the allocator still holds from before
    torch.ones(300 * MIB // 4).sum()


def test_without_a_setting_a_job_leaves_the_machine_a_reserve() -> None:
    with MemoryLimit(torch.device("cpu")).held():
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    # Other programs take and give back memory between two looks.
    assert available_bytes() / 2 < limit - private_bytes() < available_bytes() - RESERVE_BYTES / 2


def test_what_a_container_may_take_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "pod" / "box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{100 * MIB}\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 0\n")
    (group.parent / "memory.max").write_text(f"{300 * MIB}\n")
    (group.parent / "memory.current").write_text(f"{120 * MIB}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {20 * MIB}\n")
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "CGROUP_OF_SELF", tmp_path / "cgroup")
    assert available_bytes() == 200 * MIB


def test_the_limit_ends_with_the_job_also_when_it_fails() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyError), MemoryLimit(torch.device("cpu"), job_bytes=MIB).held():
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
