"""Results that are laid out first and filled piece by piece."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradbox.errors import InvalidInputs, StorageFull
from gradbox.tensors.checksums import is_whole
from gradbox.tensors.safetensors_header import read_header
from gradbox_service.store import Room
from gradbox_worker.files import placed_rows
from gradbox_worker.files.result_file import write_result
from gradbox_worker.files.result_in_place import ResultOnDisk
from tests.disks import largest_file, small_disk

MIB = 2**20
WEIGHT, BIAS, SCALE = (5, 3, 4, 2), (5, 3, 4), (5, 3)
EVERYTHING = slice(0, 5), slice(0, 3), slice(0, 4)


def pieces(whole: Tensor) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Cut an array as the engine does: samples, then outputs of one sample, then rows of one."""
    yield (slice(2, 5), *EVERYTHING[1:]), whole[2:5]
    yield (slice(1, 2), slice(1, 3), slice(0, 4)), whole[1:2, 1:3]
    yield (slice(1, 2), slice(0, 1), slice(2, 4)), whole[1:2, :1, 2:4]
    yield (slice(1, 2), slice(0, 1), slice(0, 2)), whole[1:2, :1, 0:2]
    yield (slice(0, 1), *EVERYTHING[1:]), whole[:1]


def test_pieces_in_any_order_make_the_array(tmp_path: Path) -> None:
    weight, bias, scale = torch.randn(WEIGHT), torch.randn(BIAS).double(), torch.randn(SCALE)
    path = tmp_path / "r.safetensors"
    arrays = {"w": weight, "b": bias, "s": scale}
    with ResultOnDisk(path, room=Room(tmp_path)) as result:
        result.lay_out(
            {name: tuple(x.shape) for name, x in arrays.items()},
            {name: x.dtype for name, x in arrays.items()},
            squeezed=False,
        )
        for at, piece in pieces(weight):
            result.write("w", at, piece)
        result.write("b", EVERYTHING, bias)
        result.write("s", (slice(0, 5), slice(0, 3), slice(0, 1)), scale[..., None])
        view = result.commit({"samples/norm": bias.sum(2)}, metadata={"gradbox": "{}"}).view
    content = path.read_bytes()
    assert (view.size_bytes, view.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    found = load_file(path)
    assert all(torch.equal(found[name], x) for name, x in arrays.items())
    assert torch.equal(found["samples/norm"], bias.sum(2))
    assert is_whole(path)
    assert read_header(path).metadata == {"gradbox": "{}"}
    assert list(tmp_path.iterdir()) == [path]


def test_gradients_have_no_dim_of_outputs(tmp_path: Path) -> None:
    rows = torch.randn(3, 1, 4)
    path = tmp_path / "r.safetensors"
    with ResultOnDisk(path, room=Room(tmp_path)) as result:
        result.lay_out({"w": (3, 1, 4)}, {"w": torch.float32}, squeezed=True)
        result.write("w", (slice(0, 3), slice(0, 1), slice(0, 4)), rows)
        result.commit({}, metadata={})
    assert torch.equal(load_file(path)["w"], rows[:, 0])


def test_what_comes_behind_narrow_rows_is_aligned(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    with ResultOnDisk(path, room=Room(tmp_path)) as result:
        result.lay_out({"w": (3, 1, 1)}, {"w": torch.bfloat16}, squeezed=True)
        rows = torch.ones(3, 1, 1, dtype=torch.bfloat16)
        result.write("w", (slice(0, 3), slice(0, 1), slice(0, 1)), rows)
        result.commit({"samples/loss": torch.arange(3).double()}, metadata={})
    assert read_header(path).tensors["samples/loss"].begin % 8 == 0
    assert torch.equal(load_file(path)["samples/loss"], torch.arange(3).double())


def test_a_header_that_outgrows_its_room_moves_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed_rows, "MOVED_BYTES", 1000)
    first, path = torch.randn(7, 111), tmp_path / "r.safetensors"
    later = {f"input_grads/{number}": torch.randn(3) for number in range(2000)}
    with ResultOnDisk(path, room=Room(tmp_path)) as result:
        result.lay_out({"first": (7, 1, 111)}, {"first": torch.float32}, squeezed=True)
        result.write("first", (slice(0, 7), slice(0, 1), slice(0, 111)), first[:, None])
        assert result.keep(tmp_path / "kept.rows") == "kept.rows"
        result.commit(later, metadata={})
    assert not (tmp_path / "kept.rows").exists()  # a later attempt would find no rows in it
    found = load_file(path)
    assert torch.equal(found["first"], first)
    assert all(torch.equal(found[name], tensor) for name, tensor in later.items())


def test_a_result_given_up_leaves_nothing(tmp_path: Path) -> None:
    with ResultOnDisk(tmp_path / "r.safetensors", room=Room(tmp_path)) as result:
        result.lay_out({"w": (3, 1, 4)}, {"w": torch.float32}, squeezed=True)
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    result = ResultOnDisk(tmp_path / "r.safetensors", room=Room(tmp_path))
    with result, pytest.raises(StorageFull, match="in reserve"):
        result.lay_out({"w": (3, 1, 4)}, {"w": torch.float32}, squeezed=True)
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    result = ResultOnDisk(tmp_path / "r.safetensors", room=Room(tmp_path))
    with result, pytest.raises(InvalidInputs, match="complex128"):
        result.lay_out({"w": (3, 1, 4)}, {"w": torch.complex128}, squeezed=True)


def used_bytes(disk: Path) -> int:
    usage = shutil.disk_usage(disk)
    return usage.total - usage.free


def test_a_result_larger_than_the_disk_takes_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        before = used_bytes(disk)
        allocate = os.posix_fallocate

        def measured(*given: int) -> None:
            try:
                allocate(*given)
            finally:
                taken.append(used_bytes(disk))

        monkeypatch.setattr(os, "posix_fallocate", measured)
        result = ResultOnDisk(disk / "r.safetensors", room=Room(disk, reserve_bytes=MIB))
        shape = (1, 1, 16 * MIB)
        with result, pytest.raises(StorageFull, match=r"64\.\d MiB.*8\.0 MiB.*1\.0 MiB"):
            result.lay_out({"w": shape}, {"w": torch.float32}, squeezed=True)
        assert all(used == before for used in taken)
        assert used_bytes(disk) == before


def test_a_result_in_memory_that_would_reach_into_the_reserve_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=8 * MIB) as disk:
        room = Room(disk, reserve_bytes=6 * MIB)
        tensors = {"w": torch.ones(MIB)}
        with pytest.raises(StorageFull, match=r"the result needs 4\.0 MiB"):
            write_result(disk / "r.safetensors", tensors, metadata={}, room=room)
        with ResultOnDisk(disk / "s.safetensors", room=room) as result:
            result.lay_out({"v": (1, 1, 4)}, {"v": torch.float32}, squeezed=True)
            with pytest.raises(StorageFull, match=r"the result needs 4\.0 MiB"):
                result.commit(tensors, metadata={})
        assert list(disk.iterdir()) == []


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    result = ResultOnDisk(tmp_path / "r.safetensors", room=Room(tmp_path))
    with largest_file(MIB), result, pytest.raises(StorageFull, match="File too large"):
        result.lay_out({"w": (1, 1, MIB)}, {"w": torch.float32}, squeezed=True)
    with largest_file(MIB), pytest.raises(StorageFull, match="File too large"):
        write_result(
            tmp_path / "r.safetensors", {"w": torch.ones(MIB)}, metadata={}, room=Room(tmp_path)
        )
    assert not list(tmp_path.iterdir())


ROWS = torch.arange(24.0).view(4, 1, 6)


@contextmanager
def laid_out(folder: Path, *, attempt: int, kept: Path | None = None) -> Iterator[ResultOnDisk]:
    """Lay out the file of an attempt at ROWS, or go on with a kept one."""
    with ResultOnDisk(folder / f"j.{attempt}.safetensors", room=Room(folder)) as result:
        if kept is not None:
            assert result.go_on(kept)
        result.lay_out({"w": tuple(ROWS.shape)}, {"w": ROWS.dtype}, squeezed=True)
        yield result


def write_rows(result: ResultOnDisk, start: int, stop: int) -> None:
    result.write("w", (slice(start, stop), slice(0, 1), slice(0, 6)), ROWS[start:stop])


@pytest.mark.parametrize("committed", [False, True])
def test_another_attempt_goes_on_with_the_rows_that_were_kept(
    tmp_path: Path, committed: bool
) -> None:
    kept = tmp_path / "kept" / "j.1.rows"
    with laid_out(tmp_path, attempt=1) as result:
        write_rows(result, 0, 2)
        assert result.keep(kept) == kept.name
        if committed:  # and the process ended before anybody knew
            write_rows(result, 2, 4)
            result.commit({"loss": torch.ones(99)}, metadata={"gradbox": "1"})
    assert kept.exists()
    with laid_out(tmp_path, attempt=2, kept=kept) as result:
        write_rows(result, 2, 4)
        view = result.commit({"loss": torch.zeros(3)}, metadata={"gradbox": "2"}).view
    path = tmp_path / "j.2.safetensors"
    content = path.read_bytes()
    assert (view.size_bytes, view.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert torch.equal(load_file(path)["w"], ROWS[:, 0])
    assert torch.equal(load_file(path)["loss"], torch.zeros(3))
    assert read_header(path).metadata == {"gradbox": "2"}
    assert path.samefile(kept)


def test_a_file_is_kept_under_one_name(tmp_path: Path) -> None:
    first, second = tmp_path / "j.1.rows", tmp_path / "j.2.rows"
    with laid_out(tmp_path, attempt=1) as result:
        assert [result.keep(first), result.keep(first)] == [first.name] * 2
    with laid_out(tmp_path, attempt=2, kept=first) as result:
        assert result.keep(second) == first.name
    assert not second.exists()


def test_a_file_that_is_still_written_is_not_taken(tmp_path: Path) -> None:
    kept = tmp_path / "j.1.rows"
    with laid_out(tmp_path, attempt=1) as first:
        first.keep(kept)
        with ResultOnDisk(tmp_path / "j.2.safetensors", room=Room(tmp_path)) as second:
            assert not second.go_on(kept)
            second.lay_out({"w": (4, 1, 6)}, {"w": ROWS.dtype}, squeezed=True)
            second.write("w", (slice(0, 4), slice(0, 1), slice(0, 6)), ROWS)
            second.commit({}, metadata={})
        write_rows(first, 0, 4)
    assert torch.equal(load_file(tmp_path / "j.2.safetensors")["w"], ROWS[:, 0])


def test_rows_that_are_gone_are_not_gone_on_with(tmp_path: Path) -> None:
    with ResultOnDisk(tmp_path / "j.2.safetensors", room=Room(tmp_path)) as result:
        assert not result.go_on(tmp_path / "j.1.rows")


def test_a_result_in_memory_has_no_rows_to_keep(tmp_path: Path) -> None:
    with ResultOnDisk(tmp_path / "j.1.safetensors", room=Room(tmp_path)) as result:
        assert result.keep(tmp_path / "j.1.rows") is None
