"""Peak memory of one step of one peer: `python -m benchmarks.memory PEER PAIRS SHARD THREADS`.

A process of its own for each figure, because an allocator keeps what an earlier step needed. The
model and the tokens are loaded before the measurement begins; the gradients are part of it.
"""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.peers import PEERS
from benchmarks.workloads import Workload
from gradbox_worker.memory import PeakMemory


def main(arguments: list[str]) -> int:
    """Print the bytes as JSON."""
    name, num_pairs, shard, threads = arguments
    torch.set_num_threads(int(threads))
    workload = Workload(int(num_pairs), int(shard))
    peer = next(peer for peer in PEERS if peer.name == name)
    assert workload.batches
    assert workload.shards
    step = peer.load(workload)
    memory = PeakMemory(torch.device("cpu"))
    step()
    peak_bytes, before_bytes = memory.measure()
    print(json.dumps({"peak_bytes": peak_bytes - before_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
