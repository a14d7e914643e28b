"""Blobs: their bytes, their digests, and whose memory they are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from gradbox import InvalidInputs
from gradbox.tensors.blob import CHUNK_BYTES, Blob
from gradbox.tensors.tensor_bytes import DTYPES, tensor_bytes


def blob(**tensors: Any) -> Blob:
    return Blob({name: tensor_bytes(value, where=name) for name, value in tensors.items()})


def written(made: Blob) -> bytes:
    return b"".join(made.chunks())


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_as_it_was(name: str) -> None:
    tensor = torch.arange(7).to(getattr(torch, name))
    (back,) = load(written(blob(x=tensor))).values()
    assert back.dtype == tensor.dtype
    assert back.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(1, 3).expand(4, 3),
        torch.arange(10.0)[::3],
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        torch.arange(10.0).reshape(5, 2)[:1, 1],
        torch.arange(10.0).reshape(5, 2)[:0, 1],
    ],
    ids="transposed expanded strided 0-dim empty conjugated trained one-of-a-column "
    "none-of-a-column".split(),
)
def test_every_layout_is_written_in_row_major_order(tensor: Tensor) -> None:
    (back,) = load(written(blob(x=tensor))).values()
    assert torch.equal(back, tensor.detach().resolve_conj())


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(3)), np.float32(2.0)],
    ids=["big-endian", "column-major", "scalar"],
)
def test_numpy_arrays_are_tensors_too(array: Any) -> None:
    (back,) = load(written(blob(x=array))).values()
    assert back.tolist() == np.asarray(array).tolist()


def test_the_digest_is_that_of_the_bytes_and_of_nothing_else() -> None:
    one = blob(a=torch.ones(3), b=torch.arange(4))
    same = blob(b=np.arange(4), a=torch.ones(1, 3).T.reshape(3))
    assert one.digest == hashlib.sha256(written(one)).hexdigest() == same.digest
    assert one.digest != blob(a=torch.ones(3), b=torch.arange(4) + 1).digest
    assert len(written(one)) == one.size_bytes


def test_tensors_begin_at_multiples_of_their_item_size() -> None:
    data = written(blob(a=torch.ones(3, dtype=torch.bool), b=torch.ones(2).double()))
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert torch.equal(load(data)["b"], torch.ones(2).double())


def test_large_tensors_are_sent_from_their_own_memory_in_bounded_pieces() -> None:
    tensor = torch.zeros(3 * CHUNK_BYTES // 4)
    chunks = list(blob(x=tensor).chunks())
    assert max(len(chunk) for chunk in chunks) <= CHUNK_BYTES
    shared = [np.shares_memory(np.frombuffer(chunk, np.uint8), tensor.numpy()) for chunk in chunks]
    assert shared == [False, True, True, True]


def test_small_tensors_are_sent_together() -> None:
    made = blob(**{f"t{index}": torch.ones(10) for index in range(1000)})
    assert len(list(made.chunks())) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "return_tensors"),
        (None, "None"),
        (np.array([{}]), "object"),
        (np.array(["a"]), "tokenise texts first"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, 2).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), "meta"),
    ],
)
def test_what_no_blob_can_hold_is_refused_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(InvalidInputs, match=said) as caught:
        tensor_bytes(value, where="shard 3")
    assert str(caught.value).startswith("shard 3: expected")
