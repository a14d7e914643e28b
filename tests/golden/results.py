"""Every computation on its table of problems, in float64 on one thread: the numbers as they are.

What `digests.json` keeps of them is a hash a problem; see `python -m tests.golden`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.cases import CASES
from tests.engine.mixed.running import mixed_answer
from tests.engine.per_sample import zoo
from tests.engine.replay.halves import first_half
from tests.engine.replay.running import answer
from tests.mixed_cases import MIXED_CASES, OBSTACLES

DIGESTS = Path(__file__).with_name("digests.json")
ROOM_BYTES = 10_000_000

Arrays = dict[str, Tensor]
Problem = Callable[[], Arrays]


def problems() -> dict[str, Problem]:
    """Return every problem by name; each builds its own model and data."""
    named: dict[str, Problem] = {}
    for name, case in CASES.items():
        named[f"set gradient: {name}"] = lambda case=case: _set_gradient(case(), 0)
        named[f"set gradient, graphs kept: {name}"] = lambda case=case: _set_gradient(
            case(), ROOM_BYTES
        )
        named[f"two halves: {name}"] = lambda case=case: _halves(case(), 0)
        named[f"two halves, graphs kept: {name}"] = lambda case=case: _halves(case(), ROOM_BYTES)
    for name in zoo.CASES:
        named[f"jacobian: {name}"] = lambda name=name: _jacobian(name)
        named[f"per-sample gradient: {name}"] = lambda name=name: _per_sample(name)
    for reduction in ("norm", "gram", "projection"):
        named[f"{reduction}: encoder layer"] = lambda how=reduction: _reduced(how)
    for name, mixed in {**MIXED_CASES, **OBSTACLES}.items():
        named[f"mixed gradient: {name}"] = lambda case=mixed: _mixed(case())
    return named


def machine() -> dict[str, str]:
    """Return what the last digits depend on beside the code."""
    return {
        "torch": torch.__version__,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": " ".join(dict.fromkeys(_processors())) or platform.processor(),
    }


def digest(arrays: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        tensor = arrays[name].detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


def kept() -> dict[str, Any]:
    """Return what `digests.json` holds: the machine, and a digest a problem."""
    read: dict[str, Any] = json.loads(DIGESTS.read_text())
    return read


def _processors() -> Iterator[str]:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith(("model name", "cpu family", "model\t", "stepping")):
            yield line.partition(":")[2].strip()


def _set_gradient(case: Any, retain: int) -> Arrays:
    found = answer(case, retain=retain)
    return {
        "loss": torch.tensor(found.loss, dtype=torch.float64),
        **_prefixed("grads", found.grads),
        **_prefixed("buffers", found.buffers or {}),
    }


def _halves(case: Any, retain: int) -> Arrays:
    half = first_half(case, retain=retain)
    outputs = {
        f"{group}.{name}": z
        for group, named in half.found.outputs.items()
        for name, z in named.items()
    }
    return {
        **_prefixed("outputs", outputs),
        **_prefixed("buffers", half.first.buffers),
        **_prefixed("grads", half.gradient().grads),
    }


def _jacobian(name: str) -> Arrays:
    model, inputs = zoo.build(name)
    found = jacobian(model, [inputs])
    assert found.values is not None
    return {"z": found.values, **_prefixed("rows", found.arrays)}


def _per_sample(name: str) -> Arrays:
    model, inputs = zoo.build(name)
    found = per_sample_gradient(
        model, [inputs], lambda z: z.reshape(len(z), -1).square().sum(1), mode="eval", seed=3
    )
    assert found.values is not None
    return {"losses": found.values, **_prefixed("rows", found.arrays)}


def _reduced(how: Any) -> Arrays:
    model, inputs = zoo.build("encoder layer")
    found = jacobian(model, [inputs], reduce=how, dim=7 if how == "projection" else None)
    return {**found.arrays, **_prefixed("norms", found.parameter_norms)}


def _mixed(case: Any) -> Arrays:
    found = mixed_answer(case)
    assert found.dfdz is not None
    return {
        "value": torch.tensor(found.value, dtype=torch.float64),
        "dfdz": found.dfdz,
        **_prefixed("grads", found.grads),
    }


def _prefixed(section: str, arrays: Mapping[str, Tensor]) -> Arrays:
    return {f"{section}/{name}": tensor for name, tensor in arrays.items()}
