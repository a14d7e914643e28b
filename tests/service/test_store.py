"""Blobs on disk: whole, checked, and safe from each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradbox.errors import BlobRejected, StorageFull
from gradbox_service.store import BlobStore, ResultStore, Room
from gradbox_service.store import blobs as blobs_module
from tests.disks import largest_file, small_disk
from tests.service.boxes import blob_of, ones

MIB = 2**20


def files_under(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_blob_is_stored_under_its_digest(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = BlobStore(tmp_path)
    store.put(digest, [data[:10], data[10:]])
    assert store.path(digest) == tmp_path / "blobs" / digest[:2] / digest
    assert store.path(digest).read_bytes() == data
    assert store.size_bytes(digest) == len(data)
    header = store.header(digest)
    assert header is not None
    assert header.tensors["x"].shape == (3,)


def test_a_missing_blob_is_none(tmp_path: Path) -> None:
    assert BlobStore(tmp_path).size_bytes("0" * 64) is None
    assert BlobStore(tmp_path).header("0" * 64) is None


def test_a_removed_blob_is_missing_though_its_header_was_read_before(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = BlobStore(tmp_path)
    store.put(digest, [data])
    assert store.header(digest) is not None
    store.path(digest).unlink()
    assert store.header(digest) is None
    store.put(digest, [data])
    assert store.header(digest) is not None


def test_bytes_of_another_digest_leave_nothing(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = BlobStore(tmp_path)
    with pytest.raises(BlobRejected, match=digest):
        store.put(digest, [data + b"\0"])
    assert store.size_bytes(digest) is None
    assert files_under(tmp_path) == set()


def test_an_upload_that_stops_leaves_nothing(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = BlobStore(tmp_path)
    with store.upload(digest) as upload:
        upload.write([data])
    assert files_under(tmp_path) == set()


def test_the_same_blob_from_many_at_once_is_whole_at_all_times(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(1 << 18)})
    store = BlobStore(tmp_path)
    ended = threading.Event()
    torn: list[int] = []

    def look() -> None:
        while not ended.is_set():
            size = store.size_bytes(digest)
            if size is not None and (size != len(data) or store.path(digest).read_bytes() != data):
                torn.append(size)

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.put(digest, [data]), range(24)))
    ended.set()
    watcher.join()
    assert not torn
    assert files_under(tmp_path) == {digest}


def test_a_mapped_blob_survives_its_replacement(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = BlobStore(tmp_path)
    store.put(digest, [data])
    with store.path(digest).open("rb") as held:
        store.put(digest, [data])
        assert held.read() == data


def test_a_sweep_removes_what_dead_uploads_left(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    upload_for_ever = (
        "import sys, time; from pathlib import Path\n"
        "from gradbox_service.store.blobs import BlobStore\n"
        "upload = BlobStore(Path(sys.argv[1])).upload('dead' * 16)\n"
        "upload.write([b'x']); print('begun', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", upload_for_ever, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"begun\n"
        begun = time.time() - 2 * blobs_module.UNLOCKED_S
        with store.upload("live" * 16) as upload:
            upload.write([b"x"])
            for path in (tmp_path / "blobs" / "incoming").iterdir():
                os.utime(path, (begun, begun))
            store.sweep()
            assert names_in(tmp_path / "blobs" / "incoming") == ["dead", "live"]
            dying.kill()
            dying.wait()
            store.sweep()
            assert names_in(tmp_path / "blobs" / "incoming") == ["live"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name[:4] for path in folder.iterdir())


def test_cached_headers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "CACHED_TENSORS", 3)
    store = BlobStore(tmp_path)
    digests = []
    for size in range(1, 6):
        digest, data = blob_of({"x": ones(size), "y": ones(size)})
        store.put(digest, [data])
        digests.append(digest)
    for digest in digests * 2:
        assert store.header(digest) is not None
    assert len(store._headers) == 1


def test_results_of_two_attempts_are_two_files(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    (tmp_path / "results").mkdir()
    for attempt in (1, 2):
        store.path("job", attempt=attempt).write_bytes(b"x")
        store.partial_path("job", attempt=attempt).write_bytes(b"x")
    store.discard("job", attempt=1)
    assert files_under(tmp_path) == {"job.2.safetensors", "job.2.partial"}


def test_an_upload_that_would_reach_into_the_reserve_is_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        store = BlobStore(disk, reserve_bytes=6 * MIB)
        with pytest.raises(StorageFull, match=r"needs 4\.0 MiB.*8\.0 MiB.*6\.0 MiB"):
            store.upload("0" * 64, announced_bytes=4 * MIB)
        assert files_under(disk) == set()


def test_an_upload_that_says_no_size_is_refused_while_it_grows(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        store = BlobStore(disk, reserve_bytes=6 * MIB)
        chunks = (bytes(MIB) for _ in range(8))
        with pytest.raises(StorageFull, match=r"6\.0 MiB are kept in reserve"):
            store.put("0" * 64, chunks)
        assert len(list(chunks)) == 8 - 3
        assert files_under(disk) == set()


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    with largest_file(MIB), pytest.raises(StorageFull, match="File too large"):
        BlobStore(tmp_path).put("0" * 64, [bytes(2 * MIB)])
    assert files_under(tmp_path) == set()


def test_the_reserve_is_a_gibibyte_or_a_twentieth_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_of(total: int) -> None:
        fields = [1, 1, total, total, total, 9, 9, 9, 0, 255]
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    disk_of(10 * 2**30)
    assert Room(tmp_path).left_bytes() == 9 * 2**30
    disk_of(100 * 2**30)
    assert Room(tmp_path).left_bytes() == 95 * 2**30
    disk_of(2**29)
    assert Room(tmp_path / "not" / "yet").left_bytes() == 0
