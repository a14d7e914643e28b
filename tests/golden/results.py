"""Every computation on its table of problems, in float64 on one thread: the numbers as they are.

What `digests.json` keeps of them is a hash a problem, and for other processors `sketches.json` two
numbers a tensor; see `python -m tests.golden`.
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

from gradbox_engine import CoupledShards, Objective, Penalty, set_gradient
from gradbox_engine.per_sample import OtherShards, jacobian, per_sample_gradient
from tests.cases import CASES
from tests.engine.curving import curved
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.mixed.running import mixed_answer
from tests.engine.per_sample import zoo
from tests.engine.ranges.running import in_ranges
from tests.engine.replay.halves import first_half
from tests.engine.replay.running import answer
from tests.mixed_cases import MIXED_CASES, OBSTACLES
from tests.stateful_models import STATEFUL, groups, loss

DIGESTS = Path(__file__).with_name("digests.json")
SKETCHES = Path(__file__).with_name("sketches.json")
ROOM_BYTES = 10_000_000
NEAR = 1e-11
"""Largest difference between two processors, of a tensor's norm."""

PENALISED = {
    "mlp": [Penalty("0", lambda tap: tap.square().mean(), 0.3), Penalty("3", torch.norm, -2.0)],
    "cnn in train": [Penalty("1", torch.norm, 0.5, lambda z: z.sum(1).sigmoid() * 3)],
    "lstm": [Penalty("lstm[0]", torch.norm, 0.2)],
}
WITH_INPUTS = ("mlp", "cnn in train", "lstm", "average saved", "two towers")
CURVED = ("mlp, labels", "cnn in train", "lstm", "two towers", "one number a shard")
MASKED_BY_SAMPLE = ("in-place activations", "cnn in train", "transformer", "two towers")

Arrays = dict[str, Tensor]
Problem = Callable[[], Arrays]


def problems() -> dict[str, Problem]:
    """Return every problem by name; each builds its own model and data."""
    named: dict[str, Problem] = {}
    for name, case in CASES.items():
        named[f"set gradient: {name}"] = lambda case=case: _set_gradient(case())
        named[f"set gradient, graphs kept: {name}"] = lambda case=case: _set_gradient(
            case(), retain=ROOM_BYTES
        )
        named[f"two halves: {name}"] = lambda case=case: _halves(case(), 0)
        named[f"two halves, graphs kept: {name}"] = lambda case=case: _halves(case(), ROOM_BYTES)
        for place in ("forward", "replay"):
            named[f"resumed in {place}: {name}"] = lambda case=case, at=place: _resumed(case(), at)
        for k in (1, 2, 3):
            named[f"{k} ranges: {name}"] = lambda case=case, k=k: _ranges(case(), k)
    for name in WITH_INPUTS:
        named[f"gradient of inputs: {name}"] = lambda name=name: _set_gradient(
            CASES[name](), wrt=["*", "inputs.*"]
        )
    for name in MASKED_BY_SAMPLE:
        named[f"masks by sample: {name}"] = lambda name=name: _set_gradient(
            CASES[name](), streams="sample"
        )
    for name, penalties in PENALISED.items():
        named[f"penalties: {name}"] = lambda name=name, terms=penalties: _set_gradient(
            CASES[name](), penalties=terms
        )
    for name in STATEFUL:
        for retain in (0, ROOM_BYTES):
            kept = ", graphs kept" if retain else ""
            named[f"stateful{kept}: {name}"] = lambda name=name, r=retain: _stateful(name, r)
    for name in zoo.CASES:
        named[f"products with rows: {name}"] = lambda name=name: _products(name)
        named[f"jacobian: {name}"] = lambda name=name: _jacobian(name)
        named[f"per-sample gradient: {name}"] = lambda name=name: _per_sample(name)
    for reduction in ("norm", "gram", "projection"):
        named[f"{reduction}: encoder layer"] = lambda how=reduction: _reduced(how)
    for name in CURVED:
        for kind in ("hessian", "ggn"):
            named[f"{kind} products: {name}"] = lambda name=name, k=kind: _curved(name, k)
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


def draws() -> str:
    """Return a digest of numbers that torch draws: where it draws others, problems are others."""
    own = torch.Generator().manual_seed(0)
    made = {
        f"{dtype}": torch.empty(3, 100, dtype=dtype) for dtype in (torch.float32, torch.float64)
    }
    for numbers in made.values():
        numbers[0].normal_(generator=own)
        numbers[1].uniform_(generator=own)
        numbers[2].bernoulli_(0.3, generator=own)
    return digest(made)


def digest(arrays: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(arrays):
        tensor = arrays[name].detach().cpu().contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


def kept() -> dict[str, Any]:
    """Return what `digests.json` holds: the machine, what it draws, and a digest a problem."""
    read: dict[str, Any] = json.loads(DIGESTS.read_text())
    return read


def _processors() -> Iterator[str]:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith(("model name", "cpu family", "model\t", "stepping")):
            yield line.partition(":")[2].strip()


def sketch(arrays: Mapping[str, Tensor]) -> list[list[float]]:
    """Return each tensor's norm, and its product with a vector that is the same everywhere."""
    found = []
    for name in sorted(arrays):
        x = arrays[name].detach().cpu().double().flatten().nan_to_num(nan=1.0)
        mixed = torch.arange(1, len(x) + 1) * 2654435761 % 2**32  # Knuth 1998, section 6.4
        mixed = (mixed ^ mixed >> 16) * 73244475 % 2**32
        found.append([float(x.norm()), float(x @ (mixed.double() / 2**31 - 1))])
    return found


def apart(found: list[list[float]], expected: list[list[float]]) -> float:
    """Return the largest difference between two sketches, of the tensor's norm.

    A tensor whose norm is under a thousandth of its problem's largest is measured by that.
    """
    if len(found) != len(expected):
        return float("inf")
    floor = max((norm for norm, _ in expected), default=0.0) / 1000
    return max(
        (
            abs(a - b) / max(pair[0], floor, 1e-300)
            for numbers, pair in zip(found, expected, strict=True)
            for a, b in zip(numbers, pair, strict=True)
        ),
        default=0.0,
    )


def _set_gradient(case: Any, **terms: Any) -> Arrays:
    return _arrays(answer(case, **terms))


def _arrays(found: Any) -> Arrays:
    inputs = {
        f"{group}.{name}.{index}": gradient
        for group, named in (found.input_grads or {}).items()
        for name, shards in named.items()
        for index, gradient in enumerate(shards)
    }
    return {
        "loss": torch.tensor(found.loss, dtype=torch.float64),
        **_prefixed("grads", found.grads),
        **_prefixed("buffers", found.buffers or {}),
        **_prefixed("inputs", inputs),
    }


def _resumed(case: Any, phase: str) -> Arrays:
    """Return what is found by a job that goes on where one was killed at its second shard."""
    kept = Kept()
    try:
        return _set_gradient(case, checkpoints=kept, observer=KilledAt(phase, 1))
    except Killed:
        return _set_gradient(case, checkpoints=kept)


def _ranges(case: Any, num_ranges: int) -> Arrays:
    try:
        return _arrays(in_ranges(case, num_ranges))
    except CoupledShards:
        return {}


def _stateful(name: str, retain: int) -> Arrays:
    model, returns = STATEFUL[name].model(), ("grads", "buffers")
    return _arrays(
        set_gradient(model, groups(), Objective(loss), mode="train", retain=retain, returns=returns)
    )


def _products(name: str) -> Arrays:
    """Return u J, J v, and J' J'ᵀ with the rows J' of other samples."""
    model, inputs = zoo.build(name)
    z = jacobian(model, [inputs], reduce="norm").values
    assert z is not None
    u = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
    v = {
        n: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)
        for n, p in model.named_parameters()
    }
    other = OtherShards([{name: x.flip(0) for name, x in inputs.items()}])
    return {
        **_prefixed("vjp", jacobian(model, [inputs], reduce="vjp", vectors=u).arrays),
        **_prefixed("jvp", jacobian(model, [inputs], reduce="jvp", vectors=v).arrays),
        **_prefixed("gram", jacobian(model, [inputs], reduce="gram", against=other).arrays),
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


def _curved(name: str, kind: str) -> Arrays:
    found = curved(CASES[name](), kind=kind)
    return {"loss": torch.tensor(found.loss, dtype=torch.float64), **found.products}


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
