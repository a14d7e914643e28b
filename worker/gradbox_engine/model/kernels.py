"""Kernels that a computation can do with, where those that torch takes cannot.

A mixed gradient differentiates twice and forward. The fused ones do neither: attention's flash and
memory-efficient kernels, cuDNN's and oneDNN's LSTM. All passes over a shard run the same kernels,
so that values and dropout masks agree between them; so the first pass pays for it too, in attention
with memory for T² scores a head.

cuDNN's recurrent layers have no backward pass in eval mode. Their dropout between layers draws from
a state that cuDNN seeds once a process, so that no replay repeats it. In both cases all layers of
the model run on torch's own kernels. So they do in a mixed gradient through a recurrent layer. What
calls `torch.lstm` itself, beside `nn.LSTM`, is not covered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox_engine.torch_private import SAVED_INPUTS

_Reentrant = torch.utils.checkpoint.CheckpointFunction


@contextmanager
def differentiable_kernels(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Have attention and recurrent layers computed from operations that all have rules.

    Args:
        modules: those of the model that runs.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    with (
        sdpa_kernel(SDPBackend.MATH),
        compiled_code_run_eagerly(),
        libraries_off() if recurrent else nullcontext(),
    ):
        yield


def repeatable_kernels(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return a context for calls of these modules, without cuDNN where it cannot serve one."""
    lacking = (isinstance(m, nn.RNNBase) and _on_cuda(m) and not suits_cudnn(m) for m in modules)
    return libraries_off() if any(lacking) else nullcontext()


def compiled_code_run_eagerly() -> AbstractContextManager[object]:
    """Return a context in which what `torch.compile` made runs as it was written.

    Compiled for a function mode, code would hold the mode's own work as of that call.
    """
    if "torch._dynamo" not in sys.modules:  # without which nothing is compiled; takes a second
        return nullcontext()
    eagerly: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eagerly


def checkpoints_inlined() -> AbstractContextManager[None]:
    """Return a context in which reentrant checkpoints simply call their function.

    They know neither forward mode nor `torch.autograd.grad`. The random numbers drawn are the same.
    """
    return replaced(torch.utils.checkpoint, "CheckpointFunction", _Inlined)


@contextmanager
def forward_mode_checkpoints() -> Iterator[None]:
    """Let checkpoints of either kind pass tangents; there is no graph to save the memory of.

    Those that are not reentrant do, but in torch 2.11, where a function without a rule for forward
    mode saves their inputs.
    """
    with checkpoints_inlined():
        if not hasattr(torch.utils.checkpoint, SAVED_INPUTS):
            yield
            return
        with replaced(torch.utils.checkpoint, SAVED_INPUTS, _NothingSaved):
            yield


def checkpoints_reached() -> AbstractContextManager[None]:
    """Return a context in which reentrant checkpoints of inputs without grad have a graph, too.

    They are functions of their inputs alone: with frozen layers below, or at the start of a model,
    the parameters inside get no gradient, without an error. There torch's other kind of checkpoint
    takes their place, which draws the same random numbers.
    """
    return replaced(torch.utils.checkpoint, "CheckpointFunction", _Reached)


@contextmanager
def replaced(owner: Any, name: str, instead: Any) -> Iterator[None]:
    """Let something else take the place of an attribute of one of torch's modules or classes."""
    before = vars(owner)[name]
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Reached:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        reached = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if reached or not torch.is_grad_enabled():
            return _Reentrant.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class _Inlined:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


class _NothingSaved:
    @staticmethod
    def apply(*_: Any) -> Tensor:
        return torch.empty(0)  # without a graph, as where nothing requires grad


@contextmanager
def libraries_off() -> Iterator[None]:
    """Let torch's own kernels run, none of cuDNN and oneDNN."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


def suits_cudnn(layer: nn.RNNBase) -> bool:
    """Return whether cuDNN's kernel has a backward pass and repeats itself, in the layer's mode."""
    return layer.training and not (layer.dropout > 0 and layer.num_layers > 1)


def _on_cuda(module: nn.Module) -> bool:
    return any(parameter.device.type == "cuda" for parameter in module.parameters())
