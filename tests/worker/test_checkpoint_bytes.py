"""What is in the file of a checkpoint, to the last bit and place in memory, and that alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradbox_engine import Checkpoint
from tests.worker.test_checkpoints import checkpoint, names


def test_another_attempt_finds_the_state_bit_for_bit(tmp_path: Path) -> None:
    state = {
        "z": torch.randn(3, 5).t(),  # in another order than its bytes
        "sums/weight": torch.tensor([float("nan"), -0.0, 1e-45], dtype=torch.float32),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4, dtype=torch.float64),
    }
    meta = {"phase": "replay", "done": 50, "loss": 0.25}
    checkpoint(tmp_path).write(Checkpoint(state, meta))
    found = checkpoint(tmp_path, attempt=2).read()
    assert found is not None
    assert found.facts == meta
    assert list(found.tensors) == list(state)  # sums run in this order
    for name, tensor in state.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert bits(found.tensors[name]) == bits(tensor)


def test_what_is_read_lies_in_memory_as_it_did(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 4)
    tensors = {
        "as it is": x,
        "transposed": x.mT,
        "permuted": x.permute(2, 0, 1),
        "part of a transposed one": x.permute(2, 0, 1)[:, :, 1:],
        "every second number": x.flatten()[::2],
        "expanded": x[:1].expand(5, 3, 4),
        "of one row": x.mT[:1],
    }
    checkpoint(tmp_path).write(Checkpoint(tensors))
    found = checkpoint(tmp_path, attempt=2).read()
    assert found is not None
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].stride() == tensor.stride()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("content", [b"", b"\x10" * 9, b"\x02\0\0\0\0\0\0\0{}", "half"])
def test_a_file_that_is_not_whole_is_not_used(tmp_path: Path, content: bytes | str) -> None:
    checkpoint(tmp_path).write(Checkpoint({"x": torch.ones(1000)}))
    path = tmp_path / "j.safetensors"
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:2000])
    assert checkpoint(tmp_path, attempt=2).read() is None


def test_rows_that_overlap_in_memory_are_read_one_behind_the_other(tmp_path: Path) -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    checkpoint(tmp_path).write(Checkpoint({"x": windows}))
    found = checkpoint(tmp_path, attempt=2).read()
    assert found is not None
    assert torch.equal(found.tensors["x"], windows)


def test_conjugates_are_kept_as_numbers(tmp_path: Path) -> None:
    x = torch.tensor([1 + 2j, -3j], dtype=torch.complex64)
    checkpoint(tmp_path).write(Checkpoint({"x": x.conj(), "negated": x.conj().imag}))
    found = checkpoint(tmp_path, attempt=2).read()
    assert found is not None
    assert found.tensors["x"].tolist() == [1 - 2j, 3j]
    assert found.tensors["negated"].tolist() == [-2.0, 3.0]


@pytest.mark.parametrize(
    "x",
    [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
)
def test_a_state_that_no_file_holds_costs_the_checkpoint_and_not_the_job(
    tmp_path: Path, x: torch.Tensor
) -> None:
    file = checkpoint(tmp_path)
    file.write(Checkpoint({"x": x}))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("damaged", ["length", "header", "numbers", "checksum"])
def test_a_file_one_bit_of_which_has_changed_is_not_used(tmp_path: Path, damaged: str) -> None:
    checkpoint(tmp_path).write(Checkpoint({"x": torch.ones(1000)}, {"done": 8}))
    path = tmp_path / "j.safetensors"
    content = bytearray(path.read_bytes())
    at = {
        "length": 1,
        "header": content.index(b"done") + 8,  # the 8: now 9 shards are done
        "numbers": len(content) - 100,
        "checksum": len(content) - 1,
    }
    content[at[damaged]] ^= 1
    path.write_bytes(content)
    assert checkpoint(tmp_path, attempt=2).read() is None
    assert names(tmp_path) == set()
