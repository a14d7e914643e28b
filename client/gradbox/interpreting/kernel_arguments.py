"""Arguments that torch's kernels take on trust, checked before a kernel sees them.

Most kernels check the indices that they are given. Those named here do not, or not on every
device, or overflow on the way to the check: they read and write where the argument says, in a
process that other people's jobs share. What cannot be checked at a small cost (`ctc_loss`,
`grid_sample`, `linalg.lu_solve`, `linalg.ldl_solve`; transposed convolutions, whose kernels crash
on strides that torch accepts) is not on the allow-list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradbox.errors import GraphRefused

MAX_EXTENT: Final = 2**20  # of a window, its step, its dilation, a padding, an output's side
# oneDNN's backward of a convolution crashes from strides of 4096 on, depending on the channels.
MAX_CONVOLUTION_STRIDE: Final = 64

# Products of their integers wrap around 64 bits, and max_pool1d then writes before its buffer.
_WINDOWED: Final = frozenset(
    f"torch.nn.functional.{name}"
    for name in """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d affine_grid avg_pool1d avg_pool2d avg_pool3d conv1d
    conv2d conv3d fold interpolate local_response_norm lp_pool1d lp_pool2d max_pool1d max_pool2d
    max_pool3d pad pixel_shuffle pixel_unshuffle unfold
    """.split()
)

_CONVOLUTIONS: Final = frozenset(f"torch.nn.functional.conv{dims}d" for dims in (1, 2, 3))
# By function, how many gates a recurrent layer's weights stack along dim 0.
_NUM_GATES: Final = {"torch.gru": 3, "torch.lstm": 4, "torch.rnn_relu": 1, "torch.rnn_tanh": 1}
_ATTENTIONS: Final = frozenset({"multi_head_attention_forward", "scaled_dot_product_attention"})


def trusted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the allow-list that checks what its kernel would believe.

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
    if name in _NUM_GATES:
        return _recurrent(name, function)
    return function


def _unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute attention by matmul and softmax: the fused kernels read masks as they are laid out.

    It has a second derivative, too, which the fused kernels of a CPU lack.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return call


def _recurrent(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a recurrent layer step by step, from weights that have all their gates.

    The fused kernels have no second derivative; torch's own take the gates' number on trust, and
    the packed form the lengths of the sequences.
    """
    gates, several_states = _NUM_GATES[name], name == "torch.lstm"

    def call(*args: Any, **kwargs: Any) -> Any:
        lists = [isinstance(value, list | tuple) for value in args]
        if kwargs or len(args) != 9 or lists[:3] != [False, several_states, True]:
            raise GraphRefused(f"{name} takes its nine arguments for unpacked input, by position")
        for weight in _gated(*args[1:4]):
            if weight.ndim == 0 or weight.shape[0] % gates:
                raise GraphRefused(f"{name}: a weight has no {gates} equal parts along dim 0")
        with _libraries_off():
            return function(*args)

    return call


def _gated(hx: Any, weights: Any, has_biases: bool) -> list[torch.Tensor]:
    """Return a layer's weights but for an LSTM's projections, the last of each layer."""
    if isinstance(hx, torch.Tensor) or len(hx) != 2 or hx[0].shape[-1:] == hx[1].shape[-1:]:
        return list(weights)
    num = 5 if has_biases else 3
    return [weight for place, weight in enumerate(weights) if place % num != num - 1]


@contextmanager
def _libraries_off() -> Iterator[None]:
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


def _windowed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    num_sizes = 3 if name == "torch.nn.functional.pad" else None  # then the value to fill with

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = [value for key, value in kwargs.items() if key != "value"]
        _check_extents(name, [*args[:num_sizes], *sizes])
        return function(*args, **kwargs)

    return call


def _stepping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        stride = kwargs.get("stride", args[3] if len(args) > 3 else 1)
        for step in stride if isinstance(stride, list | tuple) else (stride,):
            if isinstance(step, int) and step > MAX_CONVOLUTION_STRIDE:
                raise GraphRefused(
                    f"{name} is given the stride {step}: it is at most {MAX_CONVOLUTION_STRIDE}"
                )
        return function(*args, **kwargs)

    return call


def _check_extents(name: str, values: Any) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _check_extents(name, value)
        elif isinstance(value, int) and abs(value) > MAX_EXTENT:
            raise GraphRefused(f"{name} is given {value}: sizes are at most {MAX_EXTENT}")


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
