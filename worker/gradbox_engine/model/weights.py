"""Other numbers in the same model, for one job.

The tensors that a model registers stay the same objects; only the data they point at is exchanged.
`restore.restored` points them back, so the registered data is never written to. Tensors that lie in
each other's memory do so in float64 as well; single ones of them are given no other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadWeights
from gradbox_engine.model.shared_memory import blocks, copies
from gradbox_engine.model.tensor_equality import equal_numbers

WIDER = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


def lay_over(
    model: nn.Module, weights: Mapping[str, Tensor] | None, *, widened: bool = False
) -> None:
    """Let the named parameters and buffers hold the given numbers.

    Args:
        weights: part of a state dict. A tied tensor may be given under any of its names.
        widened: whether the model was widened, see `widen`. The weights then are too: they may
            be float64, as buffers are that an earlier job returned.

    Raises:
        BadWeights: a name is unknown, a shape or dtype differs, two names of one tensor are
            given different numbers, or a tensor lies in the memory of another one.
    """
    if not weights:
        return
    if widened:
        weights = {name: weight.to(wide_dtype(weight.dtype)) for name, weight in weights.items()}
    registered: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    registered.update(model.named_buffers(remove_duplicate=False))
    given: dict[int, str] = {}
    for name, weight in weights.items():
        target = registered.get(name)
        if target is None:
            raise BadWeights(
                f"weights[{name!r}]: the model has no parameter or buffer of that name; it has "
                f"{', '.join(map(repr, list(registered)[:3]))}, …"
            )
        _check(name, weight, target)
        first = given.setdefault(id(target), name)
        if first != name and not equal_numbers(weights[first], weight):
            raise BadWeights(
                f"weights[{name!r}] and weights[{first!r}] are one tied tensor in the model, but "
                f"were given different numbers; give one of them"
            )
    _check_memory(registered, given)
    for name in given.values():
        target = registered[name]
        # A copy, for the forward pass may write to a buffer, and what is given is the caller's.
        target.data = weights[name].detach().to(target.device, copy=True).contiguous()


def _check_memory(registered: Mapping[str, Tensor], given: Mapping[int, str]) -> None:
    """Refuse tensors that lie in the memory of others, which would not see their numbers."""
    names = {id(tensor): name for name, tensor in registered.items()}
    for block in blocks(registered.values()):
        for tensor in block if len(block) > 1 else ():
            if id(tensor) in given:
                other = next(names[id(one)] for one in block if one is not tensor)
                raise BadWeights(
                    f"weights[{given[id(tensor)]!r}]: expected a tensor with memory of its own, "
                    f"got one that lies in the same memory as {other!r} in the model; tie them by "
                    f"one nn.Parameter where the model is built, or give neither"
                )


def widen(model: nn.Module) -> None:
    """Let every floating-point parameter and buffer hold float64 copies of its numbers."""
    for block in blocks((*model.parameters(), *model.buffers())):
        narrow = [tensor for tensor in block if tensor.dtype != wide_dtype(tensor.dtype)]
        wide = copies(narrow, dtype=wide_dtype)
        for tensor in narrow:
            tensor.data = wide[id(tensor)]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the double-precision dtype of the same kind; integers and booleans stay."""
    return torch.float64 if dtype.is_floating_point else WIDER.get(dtype, dtype)


def _check(name: str, weight: Tensor, target: Tensor) -> None:
    if weight.shape != target.shape:
        raise BadWeights(
            f"weights[{name!r}]: expected shape {tuple(target.shape)}, got {tuple(weight.shape)}"
        )
    if weight.dtype != target.dtype:
        raise BadWeights(
            f"weights[{name!r}]: expected {target.dtype}, got {weight.dtype}; convert it, so that "
            f"the rounding is yours to see"
        )
