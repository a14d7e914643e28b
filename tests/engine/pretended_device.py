"""A device that computes on the CPU and refuses the CPU's tensors, as a GPU does another's.

It is torch's backend for extensions, written in Python (torch/utils/backend_registration.py), so a
process that imports this module has it ever after: it is for a process of its own. There is one
such device, for torch's autograd knows of no second one; the CPU is the other.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

CPU: Final = torch.device("cpu")
aten = torch.ops.aten


class Backend(_DummyBackendModule):
    """What torch asks the module of a backend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("pretended", backend_module=Backend())
PRETENDED: Final = torch.device("pretended:0")


class Pretended(Tensor):
    """A tensor of the pretended device, which holds one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PRETENDED,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Pretended) -> None:
        self.held = value.held

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with what the tensors hold.

        Raises:
            RuntimeError: one of them is on the CPU, and has a dim.
        """
        kwargs = dict(kwargs or {})
        if func is aten.copy_.default:
            func(_held(args[0]), _held(args[1]))
            return args[0]
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(not isinstance(tensor, cls) and tensor.dim() > 0 for tensor in given):
            raise RuntimeError(f"Expected all tensors to be on the same device, as {func} does")
        device = kwargs.get("device") or PRETENDED
        if "device" in kwargs:
            kwargs["device"] = CPU
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if device.type == "cpu":
            return found
        same = {id(tensor.held): tensor for tensor in given if isinstance(tensor, cls)}

        def on_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return same[id(value)] if id(value) in same else cls(value)

        return tree_map(on_device, found)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def _empty(size: Any, **given: Any) -> Tensor:
    return Pretended(torch.empty(size, dtype=given.get("dtype")))


def _empty_strided(size: Any, stride: Any, **given: Any) -> Tensor:
    return Pretended(torch.empty_strided(size, stride, dtype=given.get("dtype")))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _held(target).copy_(_held(source))
    return target


OPERATIONS: Final = torch.library.Library("aten", "IMPL")
OPERATIONS.impl("empty.memory_format", _empty, "PrivateUse1")
OPERATIONS.impl("empty_strided", _empty_strided, "PrivateUse1")
OPERATIONS.impl("_copy_from", _copy_from, "PrivateUse1")
