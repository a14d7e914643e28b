"""Outputs of shards are copied behind one another, and leave no holes in the heap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from gradbox_engine.replay.output_blocks import OutputBlocks

SHARDS: list[dict[str, Tensor]] = [
    {"z": torch.arange(12.0).view(3, 4), "mask": torch.tensor(True)},
    {"z": -torch.arange(20.0).view(5, 4), "mask": torch.tensor(False)},  # ragged
    {"z": torch.ones(2, 4, dtype=torch.float64), "mask": torch.tensor(True)},  # of another dtype
    {"z": torch.empty(0, 4), "mask": torch.tensor(True)},
    {"z": torch.arange(8.0).view(4, 2).T, "mask": torch.tensor(False)},  # not contiguous
]


def test_copies_are_equal_and_share_nothing_with_what_they_copy_or_each_other() -> None:
    blocks = OutputBlocks(len(SHARDS))
    copies = [blocks.copy(shard) for shard in SHARDS]
    for copied, shard in zip(copies, SHARDS, strict=True):
        for name, z in shard.items():
            torch.testing.assert_close(copied[name], z, rtol=0, atol=0)
    copies[0]["z"].fill_(7.0)
    assert torch.equal(copies[1]["z"], SHARDS[1]["z"])
    assert SHARDS[0]["z"][0, 1] == 1.0


def test_a_copy_has_no_graph() -> None:
    z = torch.ones(2, 3, requires_grad=True) * 2
    assert not OutputBlocks(1).copy({"z": z})["z"].requires_grad


def test_shards_of_one_size_lie_in_one_block() -> None:
    blocks = OutputBlocks(3)
    copies = [blocks.copy({"z": torch.ones(4, 4)})["z"] for _ in range(3)]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert copies[0].untyped_storage().nbytes() == 3 * 4 * 4 * 4


MEASURED = """
import torch
from gradbox_engine import Group, set_outputs

def used():
    text = open("/proc/self/status").read()
    return int(text.partition("RssAnon:")[2].split()[0]) / 1024

torch.set_num_threads(1)
model = torch.nn.Linear(4, 4096)
shards = [{"input": torch.randn(64, 4)} for _ in range(200)]  # each z is 1 MiB
set_outputs(model, [Group("x", shards[:2])])
before = used()
answer = set_outputs(model, [Group("x", shards)])
with_z = used()
del answer
print(with_z - before, used() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_forward_holds_its_outputs_once_and_gives_their_memory_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=500
    )
    held, left = map(float, done.stdout.split())
    assert 200 <= held <= 230
    assert left <= 80  # a block of 64 MiB at most
