"""Parameters that a forward pass writes to: the registered model would no longer be the same.

Layers that take their first numbers from their first batch do so, and models that clip their
weights. To undo it would take a copy of the weights, so it is refused, in this job and in all later
ones of the same model; who holds the model can ask, and load it again. Writes through `.data` leave
no trace in a version counter; so in a model's first job of each mode, the sum of every parameter's
bits is compared before and after.

Cost: two passes over the weights in that job, at the speed of the memory. Not noticed: what keeps
that sum, as a permutation does, and what begins in a later job.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.model.tensor_equality import strided_parts

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_compared: weakref.WeakKeyDictionary[nn.Module, dict[str, str | None]] = weakref.WeakKeyDictionary()
"""By model and mode: the parameter that a job wrote to, None where it wrote to none."""


@contextmanager
def unwritten_parameters(model: nn.Module, mode: str) -> Iterator[None]:
    """See that what runs in here leaves the numbers of all parameters as they are.

    Raises:
        ModelCallFailed: it has not, or an earlier job of the model has not.
    """
    found = _compared.setdefault(model, {})
    _refuse(model)
    if mode in found:
        yield
        return
    before = _sums(model)
    try:
        yield
    except torch.AcceleratorError:  # the device tells nothing any more
        raise
    except BaseException:
        with suppress(torch.AcceleratorError):
            written = _changed(before, _sums(model))
            if written is not None:
                found[mode] = written
        raise
    found[mode] = _changed(before, _sums(model))
    _refuse(model)


def written_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter that a job has written to, None where none has."""
    return next((name for name in _compared.get(model, {}).values() if name is not None), None)


def _refuse(model: nn.Module) -> None:
    name = written_parameter(model)
    if name is not None:
        raise ModelCallFailed(
            f"parameter {name!r}: expected the forward pass to leave it as it was registered, got "
            f"other numbers after it, so this model is not the registered one any more and has to "
            f"be loaded again, as a box does; let its builder call it once, if it takes its first "
            f"numbers from a batch, and keep what changes later in buffers"
        )


def _sums(model: nn.Module) -> dict[str, Sequence[Tensor]]:
    return {
        name: [_sum_of_bits(part) for part in strided_parts(parameter.detach()) if part.numel()]
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta or parameter.is_quantized)
    }


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as whole numbers, of 64 bits each where they line up."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = tensor.itemsize
    if (
        size < 8
        and tensor.is_contiguous()
        and tensor.nbytes % 8 == 0
        and tensor.storage_offset() * size % 8 == 0
    ):
        return tensor.view(-1).view(torch.int64).sum()
    return tensor.view(_WHOLE[size]).sum()


def _changed(
    before: Mapping[str, Sequence[Tensor]], after: Mapping[str, Sequence[Tensor]]
) -> str | None:
    for name, sums in before.items():
        if name in after and not all(map(torch.equal, sums, after[name])):
            return name
    return None
