"""Calls of a remote model: what each was given, and by which line of the user's code."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.utils import checkpoint

from gradbox.errors import InvalidInputs
from gradbox.inputs.shards import Shard, read_shard
from gradbox.protocol import MethodView
from gradbox.tensors.tensor_bytes import is_tensor, tensor_bytes

PACKAGE: Final = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True, eq=False)
class Call:
    """One call: what it was given, where in the user's code, and whether it recorded a graph."""

    method: str
    arguments: Shard  # as they were then
    leaves: Mapping[str, torch.Tensor]  # those that require grad, with their graphs
    recorded: bool
    device: torch.device  # where its outputs go
    where: str
    index: int = -1  # counted over the model's life, from where the call joins a job


def read_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str,
    signature: MethodView,
) -> Call:
    """Record a call. Tensors are copied, since the caller may write to them afterwards.

    Raises:
        InvalidInputs: an argument is not a tensor, not one of the entry point's, or complex where
            it requires grad; or the call is under one of torch.func's transforms, activation
            checkpointing or forward-mode autograd.
    """
    _refuse_checkpointing()
    if torch._C._are_functorch_transforms_active():
        raise InvalidInputs(
            "expected a call outside torch.func's transforms, got one under vmap, grad, vjp or the "
            "like, which cannot reach through a network: call the model first, and transform what "
            "is computed from its outputs"
        )
    alone = len(args) == 1 and not kwargs and not is_tensor(args[0])
    shard = args[0] if alone else {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    given = read_shard(shard, where=f"{method}()")
    check_arguments(list(given), method=method, signature=signature)
    copies = {name: _copy(tensor.source) for name, tensor in given.items()}
    _refuse_tangents(copies)
    recorded = torch.is_grad_enabled()
    leaves = {
        name: value
        for name, value in copies.items()
        if recorded and isinstance(value, torch.Tensor) and value.requires_grad
    }
    _refuse_complex(leaves)
    return Call(
        method=method,
        arguments={name: tensor_bytes(value, where=name) for name, value in copies.items()},
        leaves=leaves,
        recorded=recorded,
        device=next(
            (v.device for v in copies.values() if isinstance(v, torch.Tensor)), torch.device("cpu")
        ),
        where=_caller(),
    )


def check_arguments(given: Sequence[str], *, method: str, signature: MethodView) -> None:
    """Refuse arguments that the entry point does not take.

    Raises:
        InvalidInputs: one is unknown, given twice or missing.
    """
    num_places = sum(name.isdigit() for name in given)
    placed = set(signature.arguments[:num_places])
    named = {name for name in given if not name.isdigit()}
    takes = f"{method}({', '.join(signature.arguments)})"
    if num_places > len(signature.arguments) and not signature.any_positional:
        raise InvalidInputs(f"expected the arguments of {takes}, got {num_places} by position")
    unknown = sorted(named - set(signature.arguments)) if not signature.any_keyword else []
    if unknown or named & placed:
        raise InvalidInputs(
            f"expected the arguments of {takes}, got {unknown or sorted(named & placed)}"
            f"{'' if unknown else ' twice'}"
        )
    missing = sorted(set(signature.required) - named - placed)
    if missing:
        raise InvalidInputs(f"expected the arguments of {takes}, got none for {missing}")


def _copy(value: Any) -> Any:
    """Return a copy; of a tensor that requires grad, one with a way back to it."""
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _refuse_checkpointing() -> None:
    """Refuse a call that a backward pass would repeat: under another stream, with other dropout."""
    if any(frame.f_code.co_filename == checkpoint.__file__ for frame in _frames()):
        raise InvalidInputs(
            "expected a call outside torch.utils.checkpoint, got one in a checkpointed function, "
            "which calls again in backward(), with other dropout: call the model outside and pass "
            "its output; its graph takes no memory here, and retain= is what it may take on the box"
        )


def _refuse_tangents(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        dual = unpack_dual(value)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            raise InvalidInputs(
                f"argument {name!r}: expected a tensor without a tangent, got a dual one: a remote "
                f"model differentiates backwards only, see torch.autograd.grad"
            )


def _refuse_complex(leaves: Mapping[str, torch.Tensor]) -> None:
    for name, value in leaves.items():
        if value.is_complex():
            raise InvalidInputs(
                f"argument {name!r}: expected real numbers where gradients of an input are wanted, "
                f"got {value.dtype}; pass its detach(), or give the model torch.view_as_real of it"
            )


def _caller() -> str:
    for frame in _frames():
        if not frame.f_code.co_filename.startswith(PACKAGE):
            break
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
