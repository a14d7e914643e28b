"""Arguments that torch's kernels take on trust, checked before a kernel sees them.

Most kernels check the indices that they are given. Those named here do not, or not on every
device, or overflow on the way to the check: they read and write where the argument says, in a
process that other people's jobs share. What cannot be checked at a small cost (`grid_sample`,
`linalg.lu_solve`, `linalg.ldl_solve`) is not on the allow-list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox.errors import GraphRefused
from gradbox_engine.model.kernels import libraries_off
from gradbox_worker.interpreting.crashing_kernels import as_number, without_crashes

MAX_EXTENT: Final = 2**20  # of a window, its step, its dilation, a padding, an output's side
# oneDNN's backward of a convolution crashes from strides of 4096 on, depending on the channels; in
# 16 bits its forward writes out of bounds at strides of 64 already, so that there it is not used.
MAX_CONVOLUTION_STRIDE: Final = 64
_HALVES: Final = (torch.bfloat16, torch.float16)

# Products of their integers wrap around 64 bits, and max_pool1d then writes before its buffer.
_WINDOWED: Final = frozenset(
    f"torch.nn.functional.{name}"
    for name in """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
    adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid avg_pool1d avg_pool2d
    avg_pool3d conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d fold
    interpolate local_response_norm lp_pool1d lp_pool2d lp_pool3d max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    pad pixel_shuffle pixel_unshuffle unfold
    """.split()
) | {"torch.stft", "stft", "torch.istft", "istft"}
# By function, where its sizes end: then come a value to fill with, or a length.
_NUM_WITH_SIZES: Final = {"torch.nn.functional.pad": 3, "torch.istft": 8, "istft": 8}

_CONVOLUTIONS: Final = frozenset(
    f"torch.nn.functional.{kind}{dims}d"
    for kind in ("conv", "conv_transpose")
    for dims in (1, 2, 3)
)
_ATTENTIONS: Final = frozenset({"multi_head_attention_forward", "scaled_dot_product_attention"})


def with_checked_arguments(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the allow-list that checks the arguments which its kernel does not.

    Args:
        name: its name on the allow-list, or a method's.
        function: what it computes with.
    """
    if name in _CONVOLUTIONS:
        function = _stepping(name, function)
    if name in _WINDOWED:
        return _windowed(name, function)
    if name.rpartition(".")[2] == "repeat_interleave":
        return _repeated(name, function)
    if name == "torch.nn.functional.multi_margin_loss":
        return _labelled(name, function, lowest=0)
    if name == "torch.nn.functional.multilabel_margin_loss":
        return _labelled(name, function, lowest=-1)
    if name.rpartition(".")[2] in _ATTENTIONS:
        return _unfused(function)
    if name == "torch.nn.functional.ctc_loss":
        return _aligned(name, function)
    if name == "torch.nn.functional.embedding":
        return _dense(function)
    return without_crashes(name, function)


def _unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute attention by matmul and softmax: the fused kernels read masks as they are laid out.

    It has a second derivative, too, which the fused kernels of a CPU lack.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return call


def _windowed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    last = _NUM_WITH_SIZES.get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = [value for key, value in kwargs.items() if key not in ("input", "value", "length")]
        _check_extents(name, [*args[1:last], *sizes])
        return function(*args, **kwargs)

    return call


def _stepping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Bound the strides of a convolution, and compute it in 32 bits where oneDNN would in 16."""

    def call(*args: Any, **kwargs: Any) -> Any:
        stride = kwargs.get("stride", args[3] if len(args) > 3 else 1)
        for step in map(as_number, stride if isinstance(stride, list | tuple) else (stride,)):
            if isinstance(step, int) and step > MAX_CONVOLUTION_STRIDE:
                raise GraphRefused(
                    f"{name} is given the stride {step}: it is at most {MAX_CONVOLUTION_STRIDE}"
                )
        halves = [value for value in (*args, *kwargs.values()) if _is_half_on_cpu(value)]
        if not halves:
            return function(*args, **kwargs)
        wide = {key: _widened(value) for key, value in kwargs.items()}
        return function(*map(_widened, args), **wide).to(halves[0].dtype)

    return call


def _is_half_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALVES and value.device.type == "cpu"


def _widened(value: Any) -> Any:
    return value.float() if _is_half_on_cpu(value) else value


def _aligned(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Hold targets to the classes, and lengths to what there is; T positions, C classes.

    The kernels of libraries are not used: they take other forms of the same arguments.
    """

    def call(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        num_positions, num_classes = log_probs.shape[0], log_probs.shape[-1]
        if targets.is_floating_point() or targets.is_complex():
            raise GraphRefused(f"{name}: targets are {targets.dtype}, and integers were expected")
        if targets.numel() and not 0 <= targets.min() <= targets.max() < num_classes:
            raise GraphRefused(f"{name}: a target is none of the {num_classes} classes")
        given = [_integers(name, lengths) for lengths in (input_lengths, target_lengths)]
        most = targets.shape[-1] if targets.ndim > 1 else targets.numel()
        for lengths, bound in zip(given, (num_positions, most), strict=True):
            if not all(0 <= length <= bound for length in lengths):
                raise GraphRefused(f"{name}: a length is below 0 or above {bound}")
        if targets.ndim == 1 and sum(given[1]) != targets.numel():
            raise GraphRefused(f"{name}: the lengths of the targets do not add up to their number")
        with libraries_off():
            return function(log_probs, targets, *given, *rest, **more)

    return call


def _integers(name: str, lengths: Any) -> list[int]:
    found = lengths.reshape(-1).tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    if not all(isinstance(length, int) for length in found):
        raise GraphRefused(f"{name}: a length is not an integer")
    return found


def _check_extents(name: str, values: Any) -> None:
    for value in map(as_number, values):
        if isinstance(value, list | tuple):
            _check_extents(name, value)
        elif isinstance(value, int) and abs(value) > MAX_EXTENT:
            raise GraphRefused(f"{name} is given {value}: sizes are at most {MAX_EXTENT}")


def _dense(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give an embedding's weight a dense gradient, as all others have; `sparse` comes last."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:6], **{**kwargs, "sparse": False})

    return call


def _repeated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Hold the counts to what is true of counts: none is negative, and their sum is the size."""

    def call(*args: Any, **kwargs: Any) -> Any:
        repeats = kwargs.get("repeats", args[min(len(args), 2) - 1] if args else None)
        if isinstance(repeats, torch.Tensor) and repeats.numel():
            total = repeats.double().sum().item()
            if repeats.min() < 0 or total >= 2**53:
                raise GraphRefused(f"{name}: a count is negative, or they make {total:g} entries")
            if kwargs.get("output_size") not in (None, total):
                raise GraphRefused(f"{name}: output_size is not the sum of the counts, {total:g}")
        return function(*args, **kwargs)

    return call


def _labelled(name: str, function: Callable[..., Any], *, lowest: int) -> Callable[..., Any]:
    def call(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        num_classes = input.shape[-1] if input.ndim else 1
        if target.numel() and not lowest <= target.min() <= target.max() < num_classes:
            raise GraphRefused(f"{name}: a target is none of the {num_classes} classes")
        return function(input, target, *args, **kwargs)

    return call
