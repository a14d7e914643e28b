"""A device that another one leads: which calls it answers, and where its inputs come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradbox import Gradient, Jacobian
from gradbox.computations import Computation
from gradbox_engine.ranges import Range
from gradbox_service.store import BlobStore, Room
from gradbox_worker.cluster import shipping
from gradbox_worker.cluster.buffers import as_buffers
from gradbox_worker.cluster.device import ClusterDevice
from gradbox_worker.cluster.leading import ranges_left
from gradbox_worker.cluster.rows import SharedRows
from gradbox_worker.cluster.shipping import OwnFolder, ShippedInputs
from gradbox_worker.device import DeviceSettings
from gradbox_worker.errors import JobStopped
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.work import Work
from tests.client.conftest import write_models

SHARDS = [torch.ones(2, 5, dtype=torch.float64)] * 2
FIRST = Range(0, 2, 0, 1)


class InProcess:
    """Stands for Ray: a reference is the object itself."""

    def put(self, value: Any) -> Any:
        return value

    def get(self, value: Any) -> Any:
        return value


def work_of(computation: Computation, folder: Path, **given: Any) -> Work:
    return Work(
        **{
            "job_id": "job",
            "attempt": 1,
            "model": "mlp",
            "model_version": "",
            "spec": computation.prepare().spec,
            "spec_digest": "0" * 64,
            "result_path": folder / "results" / "job.1.safetensors",
            "queued_s": 0.0,
            **given,
        }
    )


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterDevice]:
    folder = tmp_path_factory.mktemp("device")
    (folder / "mark").write_text("seen")
    settings = DeviceSettings(write_models(folder / "models.toml"), folder, device="cpu")
    device = ClusterDevice(settings, "here/cpu-0", (folder / "mark", "seen"))
    yield device
    device.empty()


def opened(device: ClusterDevice, computation: Computation) -> None:
    version = device.describe().entry.models["mlp"]
    device.open(work_of(computation, Path("job"), model_version=version), None, "", None)


@pytest.mark.parametrize("job", [("other", 1), ("job", 2)], ids=["another job", "attempt"])
@pytest.mark.parametrize("method", ["forward", "replay", "take_sums"])
def test_a_call_for_a_job_that_is_not_open_there_is_refused(
    device: ClusterDevice, method: str, job: tuple[str, int]
) -> None:
    opened(device, Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum()))
    with pytest.raises(JobStopped):
        device.call(job, None, method, FIRST)


def test_a_device_that_was_made_empty_has_no_job(device: ClusterDevice) -> None:
    opened(device, Jacobian(model="mlp", inputs=SHARDS, reduce="gram"))
    device.empty()
    with pytest.raises(JobStopped):
        device.call(("job", 1), None, "plans", (), False)


def test_blobs_are_fetched_into_a_folder_of_the_devices_own_when_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "ray", InProcess())
    monkeypatch.setattr(shipping, "_folder", lambda _: tmp_path)
    job = Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum())
    submission = job.prepare()
    store = BlobStore(tmp_path / "box")
    for blob in submission.blobs:
        store.put(blob.digest, list(blob.chunks()))
    work = work_of(job, tmp_path / "box")
    shipped = ShippedInputs.of(work, store)
    assert shipped.num_bytes > 0
    own = OwnFolder()
    found = own.blobs(shipped)
    (digest, *_) = shipped.blobs
    assert not found.path(digest).exists()
    assert found.header(digest) == store.header(digest)
    assert found.path(digest).read_bytes() == store.path(digest).read_bytes()
    assert own.here(work, shipped).result_path.parent == own.path / "results"
    own.clear()
    assert not found.path(digest).exists()


def left(folder: Path, *names: str, attempt: int = 2) -> list[tuple[int, int]]:
    """Return the ranges that are found where files of these names were left."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    for name in names:
        (folder / "checkpoints" / name).touch()
    job = Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum())
    parts = ranges_left(work_of(job, folder, attempt=attempt))
    assert [part.index for part in parts] == list(range(len(parts)))
    return [(part.start, part.stop) for part in parts]


def test_another_attempt_takes_the_ranges_that_the_one_before_has_left(tmp_path: Path) -> None:
    names = ("job.0-3.safetensors", "job.3-10.safetensors", "job.1.rows", "other.0-2.safetensors")
    assert left(tmp_path, *names) == [(0, 3), (3, 10)]
    assert left(tmp_path, attempt=1) == []
    assert left(tmp_path, "job.5-6.safetensors") == []  # not all of one cut


def test_ranges_of_which_one_has_left_nothing_are_cut_anew(tmp_path: Path) -> None:
    assert left(tmp_path, "job.3-10.safetensors") == []


LAYOUT = {"shapes": {"w": (2, 1, 3)}, "dtypes": {"w": torch.float32}, "squeezed": True}


def test_rows_of_a_helper_are_written_by_the_leader_and_kept_for_another_attempt(
    tmp_path: Path,
) -> None:
    work = work_of(Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum()), tmp_path)
    counted: list[tuple[str, int]] = []
    rows = torch.arange(6.0).view(2, 1, 3)
    places = [(slice(n, n + 1), slice(0, 1), slice(0, 3)) for n in range(2)]
    with ResultOnDisk(work.result_path, room=Room(tmp_path)) as result:
        shared = SharedRows(work, result, lambda kind, size: counted.append((kind, size)))
        shared.of_helper("lay_out", LAYOUT)
        shared.lay_out(**LAYOUT)  # the leader's own range: the file is there
        handed = {"name": "w", "at": places[0], "piece": rows[:1]}
        shared.of_helper("write", as_buffers(handed))
        shared.write("w", places[1], rows[1:])
        kept = shared.of_helper("keep", {"place": work.checkpoints / "job.1-abc.rows"})
        assert kept == shared.kept_as == "job.1.rows"
        with pytest.raises(OSError, match="another machine"):
            shared.of_helper("keep", {"place": tmp_path / "elsewhere" / "job.rows"})
    assert sum(size for _, size in counted) == rows[:1].nbytes
    again = replace(work, attempt=2, result_path=tmp_path / "results" / "job.2.safetensors")
    with ResultOnDisk(again.result_path, room=Room(tmp_path)) as result:
        shared = SharedRows(again, result, lambda *_: None)
        assert shared.go_on(work.checkpoints / "job.1.rows")
        shared.lay_out(**LAYOUT)
        result.commit({}, metadata={})
    assert torch.equal(load_file(again.result_path)["w"], rows[:, 0])
