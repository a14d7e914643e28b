"""What a forward pass may not do to the registered model, for nothing puts it back.

It may register no parameter, for that has no gradient, and no hook on one, which would run once
more for each pass. It may write to none: the registered model would no longer be the same. Layers
that take their first numbers from their first batch do so, and models that clip their weights. To
undo it would take a copy of the weights, so it is refused, in this job and in all later ones of the
same model; who holds the model can ask, and load it again.

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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradbox_engine.errors import (
    CoupledSamples,
    CoupledShards,
    EngineError,
    ModelCallFailed,
    ReplayMismatch,
    SelfCheckFailed,
)
from gradbox_engine.model.state.restore import renormed
from gradbox_engine.model.tensor_equality import strided_parts
from gradbox_engine.torch_private import hooks_on_gradient, version_of

# Errors of two calls of a model that were compared.
COMPARISONS = (ReplayMismatch, CoupledShards, CoupledSamples, SelfCheckFailed)

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Known:
    """What a model's jobs have found out of its parameters, by name."""

    checked: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By mode, what a job has left as it was."""
    sums: dict[str, list[int]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    written: str | None = None
    """One that was written to."""
    keeps_state: bool = False
    """Whether the model keeps state elsewhere."""

    def moved(self, versions: Mapping[str, int]) -> list[str]:
        return [name for name in versions if versions[name] != self.versions.get(name)]

    def refuse_written(self) -> None:
        if self.written is not None:
            raise ModelCallFailed(
                f"parameter {self.written!r}: expected the forward pass to leave it as it was "
                f"registered, got other numbers after it, so this model is not the registered one "
                f"any more and has to be loaded again, as a box does; let its builder call it "
                f"once, if it takes its first numbers from a batch, and keep what changes later in "
                f"buffers"
            )

    def explain(self, error: BaseException) -> None:
        """Raise what is known to be the reason of an error, if anything is.

        Raises:
            ModelCallFailed: two calls gave different outputs, and a parameter was written to.
        """
        if isinstance(error, COMPARISONS):
            self.refuse_written()
        self.keeps_state |= isinstance(error, ReplayMismatch) or (
            isinstance(error, CoupledShards) and not error.name
        )


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class Changes:
    """The changes that a job's forward passes have made to a model's parameters."""

    def __init__(
        self, model: nn.Module, mode: str, *, overlaid: Collection[int], differentiated: bool
    ) -> None:
        """Note what the model has before the first pass; arguments as in `unwritten_parameters`.

        Raises:
            ModelCallFailed: an earlier job has written to one.
        """
        self._model, self._overlaid, self._differentiated = model, overlaid, differentiated
        self.known = _known.setdefault(model, _Known())
        self.known.refuse_written()
        named = list(model.named_parameters())
        self._num_hooks = {id(p): len(hooks_on_gradient(p) or ()) for _, p in named}
        self._parameters = {
            name: parameter
            for name, parameter in named
            if not (parameter.is_meta or parameter.is_quantized)
        }
        checked = self.known.checked[mode]
        self.unchecked = [
            name
            for name, parameter in self._parameters.items()
            if name not in checked and id(parameter) not in overlaid
        ]
        """Those whose first job this is in the mode."""
        versions = _versions(self._parameters)
        for name in self.known.moved(versions):  # the caller has changed these
            self.known.sums.pop(name, None)
        self.known.sums |= {name: _sums_of_bits(self._parameters[name]) for name in self.unchecked}
        self.known.versions = versions

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse them at the end of what is in here, after which the model stays prepared.

        Raises:
            ModelCallFailed: the model has made one.
        """
        try:
            yield
        except EngineError as error:
            self._look()
            self.known.explain(error)
            raise
        self.refuse_new()
        self._look()
        self.known.refuse_written()

    def refuse_new(self) -> None:
        """Refuse new parameters, and hooks.

        Raises:
            ModelCallFailed: there are some.
        """
        if not self._differentiated:
            return
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._num_hooks:
                if parameter.requires_grad:
                    raise ModelCallFailed(
                        f"parameter {name!r}: expected the model to have it when it was "
                        f"registered, got it in the forward pass, so it has no gradient; call the "
                        f"model once where it is built, or make it there"
                    )
            elif len(hooks_on_gradient(parameter) or ()) != self._num_hooks[id(parameter)]:
                raise ModelCallFailed(
                    f"parameter {name!r}: expected its hooks to stay as they were registered, got "
                    f"others after the forward pass, which every pass would add to; register them "
                    f"where the model is built"
                )

    def end(self) -> None:
        """Note one that was written to, once the model was put back."""
        self._look(put_back=True)
        self.known.versions = _versions(self._parameters)

    def _look(self, *, put_back: bool = False) -> None:
        """Note one that was written to; of what the job puts back itself, none before it has."""
        own = set() if put_back else renormed(self._model.modules()).union(self._overlaid)
        for name in (*self.unchecked, *self.known.moved(_versions(self._parameters))):
            parameter = self._parameters[name]
            if id(parameter) in own or name not in self.known.sums:
                continue
            if _sums_of_bits(parameter) != self.known.sums[name]:
                self.known.written = name
                return


@contextmanager
def unwritten_parameters(
    model: nn.Module,
    mode: str,
    *,
    overlaid: Collection[int] = (),
    differentiated: bool = False,
) -> Iterator[Changes]:
    """See that what runs in here leaves the numbers of all parameters as they are.

    Gives what may be asked before the end.

    Args:
        overlaid: the ids of parameters that hold numbers of the job's own in here.
        differentiated: whether any parameter is.

    Raises:
        ModelCallFailed: it has not, or an earlier job of the model has not.
    """
    changes = Changes(model, mode, overlaid=overlaid, differentiated=differentiated)
    known = changes.known
    try:
        yield changes
    except torch.AcceleratorError:  # the device tells nothing any more
        raise
    except BaseException as error:
        with suppress(torch.AcceleratorError):
            changes.end()
        known.explain(error)
        raise
    changes.end()
    known.refuse_written()
    known.checked[mode].update(changes.unchecked)


def why_load_again(model: nn.Module) -> str | None:
    """Return why a model is not the registered one any more, None where nothing says so."""
    known = _known.get(model)
    if known is not None and known.written is not None:
        return f"it wrote to its parameter {known.written!r}"
    if known is not None and known.keeps_state:
        return "it keeps state that no job puts back"
    return None


def _versions(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how often each was written to, but those made under inference mode do not count."""
    return {name: 0 if p.is_inference() else version_of(p) for name, p in parameters.items()}


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
