"""Parameters that a forward pass writes to: the registered model would no longer be the same.

Layers that take their first numbers from their first batch do so, and models that clip their
weights. To undo it would take a copy of the weights, so it is refused, in this job and in all later
ones of the same model; who holds the model can ask, and load it again.

Writes through `.data` leave no trace in a version counter; so in the first job of each mode, the
sum of a parameter's bits is compared before and after. In later jobs that is done for those
parameters alone whose version counter has moved, with the sums of the first one. A job that lays
other numbers over a parameter may have them written to, and is not its first one.

Cost: two passes over the weights in the first job of a mode, at the speed of the memory. Not
noticed: what keeps that sum, as a permutation does; what a later job is the first to write through
`.data`; and in a parameter that the caller wrote to since the first job, any later write.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradbox_engine.errors import (
    CoupledSamples,
    CoupledShards,
    ModelCallFailed,
    ReplayMismatch,
    SelfCheckFailed,
)
from gradbox_engine.model.state.restore import renormed
from gradbox_engine.model.tensor_equality import strided_parts

# Errors of two calls of a model that were compared.
COMPARISONS = (ReplayMismatch, CoupledShards, CoupledSamples, SelfCheckFailed)

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ParameterWatch:
    """What is known of a model's parameters, by name.

    In a job `parameters` are the model's, `first` those of them whose first job it is, and
    `overlaid` the ids of those that hold numbers of the job's own. `written` is one that was
    written to; `keeps_state` tells of state kept elsewhere.
    """

    # By mode: what a job has left as it was.
    checked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    sums: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    first: Sequence[str] = ()
    overlaid: Collection[int] = ()
    written: str | None = None
    keeps_state: bool = False

    def begin(
        self,
        parameters: Mapping[str, Tensor],
        first: Sequence[str],
        overlaid: Collection[int],
    ) -> None:
        """Note what they hold whose first job this is, and which others the caller changed."""
        self.parameters, self.first, self.overlaid = parameters, first, overlaid
        versions = _versions(parameters)
        for name in self._moved(versions):
            self.sums.pop(name, None)
        self.sums |= {name: _sums_of_bits(parameters[name]) for name in first}
        self.versions = versions

    def look(self, model: nn.Module) -> None:
        """Note one that was written to so far, while the job is not over."""
        put_back = renormed(model.modules()).union(self.overlaid)
        own = {name for name, parameter in self.parameters.items() if id(parameter) in put_back}
        self._look(_versions(self.parameters), but=own)

    def end(self) -> None:
        """Note one that was written to."""
        versions = _versions(self.parameters)
        self._look(versions)
        self.versions, self.parameters, self.first = versions, {}, ()

    def _look(self, versions: Mapping[str, int], *, but: Container[str] = ()) -> None:
        for name in (*self.first, *self._moved(versions)):
            if name in but or name not in self.sums:
                continue
            if _sums_of_bits(self.parameters[name]) != self.sums[name]:
                self.written = name
                return

    def explain(self, error: BaseException) -> None:
        """Raise what is known to be the reason of an error, if anything is.

        Raises:
            ModelCallFailed: two calls gave different outputs, and a parameter was written to.
        """
        if isinstance(error, COMPARISONS):
            self.refuse()
        self.keeps_state |= isinstance(error, ReplayMismatch) or (
            isinstance(error, CoupledShards) and not error.name
        )

    def refuse(self) -> None:
        """Raise where a parameter was written to."""
        if self.written is not None:
            raise ModelCallFailed(
                f"parameter {self.written!r}: expected the forward pass to leave it as it was "
                f"registered, got other numbers after it, so this model is not the registered one "
                f"any more and has to be loaded again, as a box does; let its builder call it "
                f"once, if it takes its first numbers from a batch, and keep what changes later in "
                f"buffers"
            )

    def _moved(self, versions: Mapping[str, int]) -> list[str]:
        return [name for name in versions if versions[name] != self.versions.get(name)]


_watches: weakref.WeakKeyDictionary[nn.Module, ParameterWatch] = weakref.WeakKeyDictionary()


@contextmanager
def unwritten_parameters(
    model: nn.Module, mode: str, *, overlaid: Collection[int] = ()
) -> Iterator[ParameterWatch]:
    """See that what runs in here leaves the numbers of all parameters as they are.

    Gives what may be asked before the end.

    Args:
        overlaid: the ids of parameters that hold numbers of the job's own in here.

    Raises:
        ModelCallFailed: it has not, or an earlier job of the model has not.
    """
    watch = _watches.setdefault(model, ParameterWatch())
    watch.refuse()
    parameters = _parameters(model)
    checked = watch.checked[mode]
    first = [n for n, p in parameters.items() if n not in checked and id(p) not in overlaid]
    watch.begin(parameters, first, overlaid)
    try:
        yield watch
    except torch.AcceleratorError:  # the device tells nothing any more
        raise
    except BaseException as error:
        with suppress(torch.AcceleratorError):
            watch.end()
        watch.explain(error)
        raise
    watch.end()
    watch.refuse()
    checked.update(first)


def why_load_again(model: nn.Module) -> str | None:
    """Return why a model is not the registered one any more, None where nothing says so."""
    watch = _watches.get(model)
    if watch is not None and watch.written is not None:
        return f"it wrote to its parameter {watch.written!r}"
    if watch is not None and watch.keeps_state:
        return "it keeps state that no job puts back"
    return None


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta or parameter.is_quantized)
    }


def _versions(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how often each was written to, but those made under inference mode do not count."""
    return {name: 0 if p.is_inference() else p._version for name, p in parameters.items()}


def _sums_of_bits(parameter: Tensor) -> list[int]:
    parts = strided_parts(parameter.detach())
    return [int(_sum_of_bits(part)) for part in parts if part.numel()]


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
