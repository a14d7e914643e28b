"""Inputs are read a tensor at a time, and results are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from gradbox.errors import BlobRejected, InvalidInputs, MissingBlobs
from gradbox.protocol import ShardRef, TensorRef
from gradbox.tensors.checksums import is_whole
from gradbox.tensors.safetensors_header import read_header
from gradbox_service.store import BlobStore, Room
from gradbox_worker.files.blob_tensors import MAX_OPEN_FILES, BlobTensors
from gradbox_worker.files.result_file import write_result
from gradbox_worker.files.safetensors_types import SAFETENSORS_NAMES

CPU = torch.device("cpu")

EVERY_DTYPE = {
    str(dtype): torch.ones(3, 2).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
        torch.float8_e4m3fn,
    )
}  # fmt: skip


def put(blobs: BlobStore, tensors: dict[str, Tensor]) -> str:
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    blobs.put(digest, [content])
    return digest


def open_files_under(folder: Path) -> int:
    """Return how many of this process's files are open there; other tests leave theirs open."""
    targets = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(target.startswith(str(folder)) for target in targets)


def same(left: Tensor, right: Tensor) -> bool:
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, EVERY_DTYPE)
    with BlobTensors(blobs, device=CPU) as tensors:
        for name, expected in EVERY_DTYPE.items():
            assert same(tensors.tensor(TensorRef(blob=digest, tensor=name)), expected)


def test_mapped_tensors_of_every_dtype_are_those_of_the_file(tmp_path: Path) -> None:
    # Three bytes first: nothing behind them lies at a multiple of its item size.
    mixed = {"odd": torch.ones(3, dtype=torch.uint8), **EVERY_DTYPE, "empty": torch.empty(0, 3)}
    entries, content = {}, b""
    for name, tensor in mixed.items():
        begin = len(content)
        content += bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(content)],
        }
    header = json.dumps(entries).encode()
    path = tmp_path / "blob"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    source = SimpleNamespace(
        small=lambda _: None, path=lambda _: path, header=lambda _: read_header(path)
    )
    with BlobTensors(source, device=CPU) as tensors:
        found = {name: tensors.shared(TensorRef(blob="0" * 64, tensor=name)) for name in mixed}
    assert all(same(found[name], expected) for name, expected in mixed.items())


def test_what_is_written_to_a_mapped_tensor_stays_out_of_the_file(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    ref = TensorRef(blob=put(blobs, {"x": torch.ones(5000)}), tensor="x")
    with BlobTensors(blobs, device=CPU) as tensors:
        tensors.shared(ref).zero_()
    with BlobTensors(blobs, device=CPU) as tensors:
        assert torch.equal(tensors.shared(ref), torch.ones(5000))


def test_a_blob_that_is_cut_short_while_it_is_read_is_said_to_be(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    ref = TensorRef(blob=put(blobs, {"x": torch.ones(5000)}), tensor="x")
    with BlobTensors(blobs, device=CPU) as tensors:
        tensors.tensor(ref)
        os.truncate(blobs.path(ref.blob), 8000)
        for read in (tensors.tensor, tensors.shared):
            with pytest.raises(BlobRejected, match="ends early; upload it again"):
                read(ref)


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)})
    with BlobTensors(blobs, device=CPU) as tensors:
        shard = tensors.shard(ShardRef(blob=digest))
    assert shard["scalar"].item() == 2.5
    assert shard["empty"].shape == (0, 3)


def test_a_prefix_picks_a_shard_and_leaves_the_argument_names(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, {"0/x": torch.zeros(1), "0/y": torch.ones(1), "1/x": torch.ones(1)})
    with BlobTensors(blobs, device=CPU) as tensors:
        assert set(tensors.shard(ShardRef(blob=digest, prefix="0/"))) == {"x", "y"}


def test_a_shard_changed_in_place_is_read_afresh_for_its_replay(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, {"x": torch.ones(2)})
    with BlobTensors(blobs, device=CPU) as tensors:
        shards = tensors.shards([ShardRef(blob=digest)])
        shards[0]["x"].zero_()
        assert torch.equal(shards[0]["x"], torch.ones(2))


def test_as_few_files_are_open_as_the_bound_says(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digests = [put(blobs, {"x": torch.tensor(float(i))}) for i in range(MAX_OPEN_FILES + 5)]
    with BlobTensors(blobs, device=CPU) as tensors:
        read = [tensors.shard(ShardRef(blob=digest))["x"].item() for digest in digests]
        assert open_files_under(tmp_path) == MAX_OPEN_FILES
    assert read == list(range(MAX_OPEN_FILES + 5))
    assert open_files_under(tmp_path) == 0


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, {"x": torch.ones(1)})
    with BlobTensors(blobs, device=CPU) as tensors:
        with pytest.raises(InvalidInputs, match=r"a tensor 'y' in blob .*, which has 'x'"):
            tensors.tensor(TensorRef(blob=digest, tensor="y"))
        with pytest.raises(InvalidInputs, match="which has 'x'"):
            tensors.shard(ShardRef(blob=digest, prefix="shard0/"))
        with pytest.raises(MissingBlobs, match="submit the job again"):
            tensors.shard(ShardRef(blob="0" * 64))


def test_a_blob_removed_after_its_header_was_read_is_missing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = put(blobs, {"x": torch.ones(1)})
    header = blobs.header(digest)
    blobs.path(digest).unlink()
    for source in (
        blobs,
        SimpleNamespace(small=lambda _: None, path=blobs.path, header=lambda _: header),
    ):
        with (
            BlobTensors(source, device=CPU) as tensors,
            pytest.raises(MissingBlobs, match="submit the job again") as caught,
        ):
            tensors.shard(ShardRef(blob=digest))
        assert caught.value.missing == (digest,)


def test_a_result_is_a_valid_file_of_the_size_and_digest_it_is_said_to_have(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.1.safetensors"
    tensors = EVERY_DTYPE | {"scalar": torch.tensor(1.5), "strided": torch.arange(6).view(2, 3).T}
    view = write_result(
        path, tensors, metadata={"format": "pt", "gradbox": "{}"}, room=Room(tmp_path)
    ).view
    content = path.read_bytes()
    assert (view.size_bytes, view.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert read_header(path).metadata == {"format": "pt", "gradbox": "{}"}
    loaded = load_file(path)
    assert loaded.keys() - {"checksums"} == tensors.keys()
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


def test_any_bit_of_a_result_that_flips_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "job.1.safetensors"
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(1)}
    write_result(path, tensors, metadata={"gradbox": "{}"}, room=Room(tmp_path))
    assert is_whole(path)
    content = path.read_bytes()
    named = content.index(b"checksums")  # without the name a file is like those of before
    for at in {*range(len(content))} - {*range(named, named + len("checksums"))}:
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        assert not is_whole(path), at


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 3 * 2**20 + 5])
def test_a_page_of_zeros_in_a_result_is_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "job.1.safetensors"
    tensors = {"a": torch.ones(size, dtype=torch.uint8), "b": torch.ones(5)}
    write_result(path, tensors, metadata={}, room=Room(tmp_path))
    assert is_whole(path)
    with path.open("r+b") as file:
        file.seek(-min(size + 20, 4096), os.SEEK_END)
        file.write(bytes(min(size + 20, 4096)))
    assert not is_whole(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3)[:1, 2],
        torch.arange(6.0).view(2, 3).T[:1, :1],
        torch.arange(6.0)[4:5].expand(1),
        torch.tensor([1 + 2j, -3j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j, -3j], dtype=torch.complex64).conj().imag,
    ],
    ids=["one entry of a column", "one by one", "one", "conjugate", "negative"],
)
def test_a_view_is_written_as_its_numbers(tmp_path: Path, tensor: Tensor) -> None:
    path = tmp_path / "job.1.safetensors"
    write_result(path, {"x": tensor}, metadata={}, room=Room(tmp_path))
    assert torch.equal(load_file(path)["x"], tensor)


def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.1.safetensors"
    with pytest.raises(RuntimeError):
        write_result(
            path,
            {"a": torch.ones(3), "b": torch.ones(3, device="meta")},
            metadata={},
            room=Room(tmp_path),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"grads/w": torch.ones(1, dtype=torch.complex128)}
    with pytest.raises(InvalidInputs, match=r"'grads/w' of torch.complex128"):
        write_result(tmp_path / "r.safetensors", tensors, metadata={}, room=Room(tmp_path))
