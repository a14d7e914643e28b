"""Blobs on disk: whole, checked, and safe from each other."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradbox.errors import BlobRejected
from gradbox_service.store import BlobStore, ResultStore, blob_store
from gradbox_service.store import blobs as blobs_module
from tests.service.boxes import blob_of, ones


def files_under(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_blob_is_stored_under_its_digest(tmp_path: Path) -> None:
    digest, data = blob_of({"x": ones(3)})
    store = blob_store(tmp_path)
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
        upload.write(data)
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
    for name in ("old", "new"):
        store.upload(name * 20).write(b"x")
    old = next((tmp_path / "incoming").glob("old*"))
    long_ago = time.time() - 2 * blobs_module.STALE_UPLOAD_S
    os.utime(old, (long_ago, long_ago))
    store.sweep()
    assert [path.name[:3] for path in (tmp_path / "incoming").iterdir()] == ["new"]


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
    for attempt in (1, 2):
        store.path("job", attempt=attempt).write_bytes(b"x")
        store.beside("job", attempt=attempt).write_bytes(b"x")
    store.discard("job", attempt=1)
    assert files_under(tmp_path) == {"job.2.safetensors", "job.2.partial"}
