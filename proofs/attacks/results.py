"""Results that lie: a box or a disk that nobody trusts, read by an honest client."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gradbox import GradResult, PerSampleGradient, ProtocolError
from proofs.attacks.attack import attack
from proofs.attacks.target import Target

OTHER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
Metadata = dict[str, str]
Tensors = dict[str, torch.Tensor]


def _term(metadata: Metadata, tensors: Tensors, changes: Mapping[str, Any]) -> None:
    """Change the terms of the embedding."""
    found = json.loads(metadata["gradbox_factors"])
    for piece in found["pieces"]:
        for term in piece:
            if term["rule"] == "lookup":
                term.update(changes)
    metadata["gradbox_factors"] = json.dumps(found)


def _ids(metadata: Metadata, tensors: Tensors, value: int) -> None:
    found = json.loads(metadata["gradbox_factors"])
    (name,) = {
        term["tensors"]["ids"]
        for piece in found["pieces"]
        for term in piece
        if term["rule"] == "lookup"
    }
    tensors[name] = torch.full_like(tensors[name], value)


def _without(metadata: Metadata, tensors: Tensors, key: str) -> None:
    metadata[key] = "{"


LIES: dict[str, Callable[[Metadata, Tensors], None]] = {
    "an id above the words": partial(_ids, value=10**6),
    "an id below zero": partial(_ids, value=-1),
    "a negative shape": partial(_term, changes={"shape": [-11, 4]}),
    "another shape": partial(_term, changes={"shape": [11, 5]}),
    "a rule nobody knows": partial(_term, changes={"rule": "os.system"}),
    "a tensor that is not there": partial(
        _term, changes={"tensors": {"left": "nothing", "ids": "nothing"}}
    ),
    "no tensors": partial(_term, changes={"tensors": {}}),
    "tensors that are a list": partial(_term, changes={"tensors": ["left", "ids"]}),
    "factors that are no JSON": partial(_without, key="gradbox_factors"),
    "a receipt that is no JSON": partial(_without, key="gradbox"),
}


def _lies(target: Target, lie: Callable[[Metadata, Tensors], None]) -> None:
    """Change a good file, and read all of it."""
    path = target.folder / "result.safetensors"
    _factored(target, path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lie(metadata, tensors)
    save_file(tensors, path, metadata)
    try:
        result = GradResult.load(path)
        for name in result.names:
            result.grads[name][:]
        result.norms()
        result.gram()
    except ProtocolError:
        return
    except OTHER_ERRORS as error:
        raise AssertionError(f"read as {type(error).__name__}: {str(error)[:200]}") from error
    raise AssertionError("the file was read as if it told the truth")


def _factored(target: Target, path: Path) -> None:
    """Write a good factored result of a model with words."""
    kept = target.box.data.parent / "factored.safetensors"
    if not kept.exists():
        words = torch.arange(6).reshape(2, 3)
        with target.client() as client:
            job = client.submit(
                PerSampleGradient(
                    model="words",
                    inputs=[words],
                    loss=lambda z: z.square().sum(1),
                    form="factored",
                )
            )
            job.wait(60.0, progress=False)
            job.fetch(kept, progress=False)
    path.write_bytes(kept.read_bytes())


for _name, _lie in LIES.items():
    attack(
        f"result: {_name}",
        tries="a factored result whose description does not fit its tensors",
        must="ProtocolError when it is opened or read; no other error, no crash, no wrong row",
    )(partial(_lies, lie=_lie))
