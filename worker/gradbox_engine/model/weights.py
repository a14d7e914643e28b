"""Other numbers in the same model, for one job.

The tensors that a model registers stay the same objects; only the data they point at is exchanged.
`restore.restored` points them back, so the registered data is never written to. Tensors that lie in
each other's memory do so in the other memory as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradbox_engine.errors import BadWeights
from gradbox_engine.model.shared_memory import blocks, move, share_entries
from gradbox_engine.model.tensor_equality import equal_numbers, is_plain, writable

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
        BadWeights: a name is unknown, a shape or dtype differs, or two names of one tensor are
            given different numbers.
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
    _check_untied(registered, given)
    for block in blocks(registered.values()):
        names = [given[id(target)] for target in block if id(target) in given]
        if names and len(block) > 1 and all(map(writable, block)):
            move(block, torch.clone)
            _lay_over_shared(registered, {name: weights[name] for name in names})
            continue
        for name in names:
            target = registered[name]
            # A copy, for the forward pass may write to a buffer, and what is given is the caller's.
            target.data = weights[name].detach().to(target.device, copy=True).contiguous()


def _lay_over_shared(registered: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        registered[name].detach().copy_(weight)
    for name, weight in weights.items():
        if not equal_numbers(registered[name].detach(), weight.to(registered[name].device)):
            raise BadWeights(
                f"weights[{name!r}]: expected the numbers of {', '.join(map(repr, weights))} to "
                f"agree where these lie in the same memory in the model, got different ones"
            )


def _check_untied(registered: Mapping[str, Tensor], given: Mapping[int, str]) -> None:
    """Refuse a tensor that lies in the memory of another one, which would keep its numbers.

    Raises:
        BadWeights: it does, and the other one is not given.
    """
    in_place: dict[int, dict[int, str]] = {}
    for name, tensor in registered.items():
        if is_plain(tensor) and tensor.numel():
            in_place.setdefault(tensor.data_ptr(), {}).setdefault(id(tensor), name)
    names = {id(tensor): name for name, tensor in reversed(list(registered.items()))}
    overlapping = [
        {id(other): names[id(other)] for other in block if share_entries(tensor, other)}
        for block in blocks(registered.values())
        if len(block) > 1
        for tensor in block
    ]
    for sharing in (*in_place.values(), *overlapping):
        named = [name for tensor, name in sharing.items() if tensor in given]
        left = [name for tensor, name in sharing.items() if tensor not in given]
        if named and left:
            raise BadWeights(
                f"weights[{named[0]!r}]: expected numbers for {left[0]!r} as well, which lies in "
                f"the same memory in the model; give both, or tie them by one nn.Parameter"
            )


def widen(model: nn.Module) -> None:
    """Let every floating-point parameter and buffer hold float64 copies of its numbers."""
    for block in blocks((*model.parameters(), *model.buffers())):
        dtype = block[0].dtype
        wide = wide_dtype(dtype)
        if dtype == wide:
            continue
        if len(block) > 1:
            move(block, lambda flat, wide=wide: flat.to(wide))  # type: ignore[misc]
        else:
            block[0].data = block[0].detach().to(wide)


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
