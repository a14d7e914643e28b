"""Nodes of a Ray cluster on this machine: `python -m tests.cluster.nodes FOLDER NUMBER`.

Prints the address once all are there; then each line of its input kills one node that is not the
first, has an actor of another program take a core ("take"), or adds a node ("join"), which may find
a folder empty, as do all later ones ("join without FOLDER", which wants root). It ends with its
input.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000  # of sched.h

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback alone
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def main() -> None:
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    Path(sys.argv[1], "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    others = [cluster.add_node(num_cpus=1) for _ in range(int(sys.argv[2]) - 1)]
    taken = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.startswith("join without "):
            _hide(line.split()[-1])
        if line.startswith("join"):
            others.append(cluster.add_node(num_cpus=1))
        elif line.startswith("take"):
            taken.append(_core_taken(cluster.address))
        else:
            cluster.remove_node(others.pop(), allow_graceful=False)
        print("done", flush=True)
    ray.shutdown()
    cluster.shutdown()


def _core_taken(address: str) -> object:
    """Have an actor with a core, until what is returned is forgotten."""
    import ray

    class Taking:
        def is_there(self) -> bool:
            return True

    ray.init(address)
    taking: Any = ray.remote(Taking).options(num_cpus=1).remote()
    assert ray.get(taking.is_there.remote())
    return taking


def _hide(folder: str) -> None:
    """Have processes that are started from now on find this folder empty, as other machines do."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    os.environ["TMPDIR"] = sys.argv[1]


if __name__ == "__main__":
    main()
