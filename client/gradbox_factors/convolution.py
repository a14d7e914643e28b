"""Convolutions: the weight gradient of every sample, by whichever of three ways is fastest here.

Shapes: B samples, Y outputs, O and C channels out and in, g groups, k the kernel's sizes, S and S'
positions in and out. A transposed convolution is the same sum with the two roles exchanged.

N = B·g convolutions are independent; each has K filters per group (Y folded in) and C/g channels:

    folded    one `convolution_backward` with N groups
    patched   unfold, then one batched matrix product
    grouped   a forward convolution with N groups, stride and dilation exchanged

Source: Rochette, Manoel and Tramel 2019, arXiv:1912.06015 (grouped); Goodfellow 2015 (the idea).
Cost: the multiplications of one weight gradient per output; `patched` also holds the unfolded
input.
Doubt: the trial that picks a way is timed once per shape and may be off on a busy machine; it
changes rounding, never the result beyond it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_factors.term import Term

_TRIALS = 3
_fastest: dict[tuple[Any, ...], Callable[..., Tensor]] = {}


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks; one number a spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Convolution(Term):
    """J of a convolution's weight, S = (O, C/g, *k), or (C, O/g, *k) where transposed.

    M images stand for each sample; their contributions are summed.
    """

    rule: ClassVar[str] = "convolution"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, M, O, *S')
    right: Tensor  # (B, M, C, *S)
    walk: Geometry

    @property
    def samples(self) -> int:
        return self.right.shape[0]

    @property
    def outputs(self) -> int:
        return self.left.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def geometry(self) -> dict[str, Any]:
        walk = self.walk
        return {
            "kernel": list(walk.kernel),
            "stride": list(walk.stride),
            "padding": list(walk.padding),
            "dilation": list(walk.dilation),
            "groups": walk.groups,
            "transposed": walk.transposed,
        }

    @classmethod
    def read(
        cls,
        parameter: str,
        shape: tuple[int, ...],
        geometry: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Self:
        walk = Geometry(
            kernel=tuple(geometry["kernel"]),
            stride=tuple(geometry["stride"]),
            padding=tuple(geometry["padding"]),
            dilation=tuple(geometry["dilation"]),
            groups=int(geometry["groups"]),
            transposed=bool(geometry["transposed"]),
        )
        return cls(parameter, shape, tensors["left"], tensors["right"], walk)

    def narrow(self, samples: slice, outputs: slice) -> Convolution:
        return replace(self, left=self.left[outputs, samples], right=self.right[samples])

    def rows(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return self.left.new_empty(self.samples, self.outputs, 0, *self.shape[1:])
        part = self if self.walk.groups > 1 else self._row_range(start, stop)
        out = self.left.new_empty(self.samples, self.outputs, *part.shape)
        part.write(out, accumulate=False)
        return out if part is not self else out[:, :, start:stop]

    def _row_range(self, start: int, stop: int) -> Convolution:
        shape = (stop - start, *self.shape[1:])
        if self.walk.transposed:
            return replace(self, shape=shape, right=self.right[:, :, start:stop])
        return replace(self, shape=shape, left=self.left[:, :, :, start:stop])

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        Y, B, M = self.left.shape[:3]
        g, kernel = self.walk.groups, self.walk.kernel
        left = self.left.permute(1, 2, 0, *range(3, self.left.dim()))
        left = left.reshape(B * M, Y, g, -1, *left.shape[4:]).transpose(1, 2)
        right = self.right.reshape(B * M, g, -1, *self.right.shape[3:])
        if self.walk.transposed:
            image = left.reshape(B * M * g, -1, *left.shape[4:])
            other = _for_every_step(
                right.reshape(B * M * g, -1, *right.shape[3:]), image, self.walk
            )
            block = weight_gradient(image, other, self.walk)
            block = block.view(B, M, g, other.shape[1], Y, -1, *kernel)
            block = block.sum(1) if M > 1 else block.select(1, 0)
            block = block.permute(0, 3, 1, 2, *range(4, block.dim()))
        else:
            image = right.reshape(B * M * g, -1, *right.shape[3:])
            other = left.reshape(B * M * g, -1, *left.shape[4:])
            if M == g == 1 and not accumulate and out.is_contiguous():
                flat = out.view(B, other.shape[1], image.shape[1], *kernel)
                weight_gradient(image, other, self.walk, out=flat)
                return
            block = weight_gradient(image, other, self.walk)
            block = block.view(B, M, g, Y, -1, image.shape[1], *kernel)
            block = block.sum(1) if M > 1 else block.select(1, 0)
            block = block.transpose(1, 2)
        target = out.view(block.shape)
        target.add_(block) if accumulate else target.copy_(block)

    def jvp(self, tangent: Tensor) -> Tensor:
        walk, dims = self.walk, len(self.walk.kernel)
        right = self.right.flatten(0, 1)
        if walk.transposed:
            # The sizes of the output settle what `output_padding` was.
            padding = _output_padding(right.shape[2:], self.left.shape[4:], walk)
            function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            image = function(
                right, tangent, None, walk.stride, walk.padding, padding, walk.groups, walk.dilation
            )
        else:
            convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
            image = convolve(
                right, tangent, None, walk.stride, walk.padding, walk.dilation, walk.groups
            )
        image = image.view(self.samples, -1)
        return torch.einsum("ybn,bn->by", self.left.flatten(2), image)

    def vjp(self, cotangent: Tensor) -> Tensor:
        left = torch.einsum("by,ybn->bn", cotangent, self.left.flatten(2))
        left = left.view(-1, *self.left.shape[3:])
        right = self.right.flatten(0, 1)
        image, other = right, left
        if self.walk.transposed:
            image, other = left, _for_every_step(right, left, self.walk)
        return _backward(image, other, self.walk, self.walk.groups, self.shape)


def _for_every_step(other: Tensor, image: Tensor, walk: Geometry) -> Tensor:
    """Return `other` with zeros for the steps of the walk that it has no numbers for.

    An output padding of a stride or more, which a dilation allows, leaves room for further steps.
    """
    missing = [
        steps - size
        for steps, size in zip(_steps(image.shape[2:], walk), other.shape[2:], strict=True)
    ]
    if not any(missing):
        return other
    return F.pad(other, [side for size in reversed(missing) for side in (0, size)])


def _steps(sizes: Sequence[int], walk: Geometry) -> list[int]:
    """Return how many steps the kernel takes along each dim of an image of these sizes."""
    dims = zip(sizes, walk.kernel, walk.stride, walk.padding, walk.dilation, strict=True)
    return [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in dims
    ]


def _output_padding(
    sizes: tuple[int, ...], out_sizes: tuple[int, ...], walk: Geometry
) -> list[int]:
    steps = zip(
        sizes, out_sizes, walk.kernel, walk.stride, walk.padding, walk.dilation, strict=True
    )
    return [
        out - ((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
        for size, out, kernel, stride, padding, dilation in steps
    ]


def weight_gradient(
    image: Tensor, other: Tensor, walk: Geometry, *, out: Tensor | None = None
) -> Tensor:
    """Return Σ over positions of `other` times the patches of `image`, (N, K, C, *k).

    Args:
        image: (N, C, *S), what the kernel walks over.
        other: (N, K, *S'), one number for each step of the walk.
        out: where to write the result.
    """
    key = (image.shape, other.shape, walk, image.dtype, image.device, torch.get_num_threads())
    way = _fastest.get(key)
    if way is None:
        way = _fastest[key] = _quickest(image, other, walk)
    return way(image, other, walk, out)


def _quickest(image: Tensor, other: Tensor, walk: Geometry) -> Callable[..., Tensor]:
    times = {}
    for way in (_folded, _patched, _grouped):
        elapsed_s = []
        for _ in range(_TRIALS):
            if image.is_cuda:
                torch.cuda.synchronize(image.device)
            start = time.perf_counter()
            way(image, other, walk, None)
            if image.is_cuda:
                torch.cuda.synchronize(image.device)
            elapsed_s.append(time.perf_counter() - start)
        times[way] = min(elapsed_s)
    return min(times, key=times.__getitem__)


def _backward(
    image: Tensor, other: Tensor, walk: Geometry, groups: int, shape: tuple[int, ...]
) -> Tensor:
    weight = image.new_empty(1).expand(shape)
    gradients = torch.ops.aten.convolution_backward(
        other, image, weight, None, walk.stride, walk.padding, walk.dilation, False,
        [0] * len(walk.kernel), groups, [False, True, False],
    )  # fmt: skip
    result: Tensor = gradients[1]
    return result


def _folded(image: Tensor, other: Tensor, walk: Geometry, out: Tensor | None) -> Tensor:
    N, C, K = image.shape[0], image.shape[1], other.shape[1]
    block = _backward(
        image.reshape(1, N * C, *image.shape[2:]),
        other.reshape(1, N * K, *other.shape[2:]),
        walk,
        N,
        (N * K, C, *walk.kernel),
    ).view(N, K, C, *walk.kernel)
    return block if out is None else out.copy_(block)


def _patched(image: Tensor, other: Tensor, walk: Geometry, out: Tensor | None) -> Tensor:
    N, C, K = image.shape[0], image.shape[1], other.shape[1]
    left, right = other.flatten(2), _patches(image, walk).mT
    if out is None:
        return torch.bmm(left, right).view(N, K, C, *walk.kernel)
    torch.bmm(left, right, out=out.view(N, K, C * prod(walk.kernel)))
    return out


def _patches(image: Tensor, walk: Geometry) -> Tensor:
    """Return what the kernel sees at each step, (N, C·∏k, steps)."""
    kernel, dims = walk.kernel, len(walk.kernel)
    if prod(kernel) == 1 and not any(walk.padding):
        every = (slice(None, None, stride) for stride in walk.stride)
        return image[(slice(None), slice(None), *every)].flatten(2)
    if dims == 2:
        return F.unfold(image, kernel, walk.dilation, walk.padding, walk.stride)
    if dims == 1:
        lifted = image.unsqueeze(2)
        return F.unfold(
            lifted, (1, *kernel), (1, *walk.dilation), (0, *walk.padding), (1, *walk.stride)
        )
    padded = F.pad(image, [side for size in reversed(walk.padding) for side in (size, size)])
    steps = _steps(image.shape[2:], walk)
    moves = padded.stride()[2:]
    strides = [
        *padded.stride()[:2],
        *(move * dilation for move, dilation in zip(moves, walk.dilation, strict=True)),
        *(move * stride for move, stride in zip(moves, walk.stride, strict=True)),
    ]
    seen = padded.as_strided([*image.shape[:2], *kernel, *steps], strides)
    return seen.reshape(image.shape[0], image.shape[1] * prod(kernel), prod(steps))


def _grouped(image: Tensor, other: Tensor, walk: Geometry, out: Tensor | None) -> Tensor:
    N, C, K = image.shape[0], image.shape[1], other.shape[1]
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(walk.kernel) - 1]
    block = convolve(
        image.transpose(0, 1),
        other.reshape(N * K, 1, *other.shape[2:]),
        None,
        walk.dilation,
        walk.padding,
        walk.stride,
        N,
    )
    for axis, size in enumerate(walk.kernel):
        block = block.narrow(axis + 2, 0, size)
    block = block.reshape(C, N, K, *walk.kernel).movedim(0, 2)
    return block if out is None else out.copy_(block)
