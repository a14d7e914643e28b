"""Renew the golden digests, and say by how much the numbers moved.

    python -m tests.golden save BEFORE.safetensors      on the code before a change
    python -m tests.golden compare BEFORE.safetensors   on the code after it: the largest difference
    python -m tests.golden renew                        writes digests.json and sketches.json

A change that only moves code renews nothing. One that changes the last digits says so in its
commit, with the largest relative difference, which is at most 1e-12.
"""

from __future__ import annotations

import argparse
import json

import torch
from safetensors.torch import load_file, save_file

from tests.golden.results import DIGESTS, SKETCHES, Arrays, digest, draws, machine, problems, sketch


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("what", choices=["save", "compare", "renew"])
    parser.add_argument("file", nargs="?")
    told = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: problem() for name, problem in problems().items()}
    if told.what == "renew":
        digests = {name: digest(arrays) for name, arrays in results.items()}
        document = {"machine": machine(), "draws": draws(), "digests": digests}
        DIGESTS.write_text(json.dumps(document, indent=1) + "\n")
        lines = (
            f"{json.dumps(name)}: {json.dumps(sketch(found))}" for name, found in results.items()
        )
        SKETCHES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    elif told.what == "save":
        save_file(_flat(results), told.file)
    else:
        _compare(load_file(told.file), _flat(results))


def _flat(results: dict[str, Arrays]) -> Arrays:
    return {
        f"{problem}|{name}": tensor.detach().clone().contiguous()
        for problem, arrays in results.items()
        for name, tensor in arrays.items()
    }


def _compare(before: Arrays, after: Arrays) -> None:
    """Print the largest ‖after − before‖ / ‖before‖, by problem where anything differs.

    A tensor whose norm is under a thousandth of its problem's largest is measured by that.
    """
    if before.keys() != after.keys():
        print("other tensors:", sorted(before.keys() ^ after.keys()))
    sizes: dict[str, float] = {}
    for name, tensor in before.items():
        problem = name.partition("|")[0]
        sizes[problem] = max(sizes.get(problem, 0.0), float(tensor.double().norm()))
    apart: dict[str, float] = {}
    for name in before.keys() & after.keys():
        problem = name.partition("|")[0]
        a, b = after[name].double(), before[name].double()
        if not torch.equal(a, b):
            scale = max(float(b.norm()), sizes[problem] / 1000)
            apart[problem] = max(apart.get(problem, 0.0), float((a - b).norm()) / scale)
    for problem, difference in sorted(apart.items(), key=lambda item: -item[1]):
        print(f"{difference:.1e}  {problem}")
    largest = max(apart.values(), default=0)
    print(f"{len(apart)} of {len(sizes)} problems differ, at most by {largest:.1e}")


if __name__ == "__main__":
    main()
