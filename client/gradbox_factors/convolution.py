"""Convolutions: the weight gradient of every sample.

Shapes: B samples, Y outputs, O and C channels out and in, g groups, k the kernel's sizes, S and S'
positions in and out. A transposed convolution is the same sum with the two roles exchanged.

N = B·g convolutions are independent; each has K filters per group (Y folded in), C/g channels and
L positions out. `weight_gradient` has two implementations:

    grouped    one `convolution_backward` with N groups
    unfolded   `unfold`, then one batched matrix product

`unfolded` is taken where L < K or the kernel has one position: few positions leave a grouped kernel
without work, and the copy that `unfold` makes is then small beside the product. On 112 shapes of
residual networks, small CNNs, 1d, 3d, depthwise, grouped and transposed convolutions (float32, one
thread, 1 and 10 outputs) the rule takes the faster one on 90 %, and at most 1.55 times its time.

Source: Rochette, Manoel and Tramel 2019, arXiv:1912.06015 (groups); Goodfellow 2015 (the idea).
Cost: the multiplications of one weight gradient per output; `unfolded` also holds the unfolded
input.
Doubt: measured on one processor, not on a GPU; it loses most on kernels with few channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_factors.outer import Outer
from gradbox_factors.term import OutputGradients
from gradbox_factors.two_sided import TwoSided


@dataclass(frozen=True)
class Geometry:
    """The sliding window of a convolution; one number a spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Convolution(OutputGradients):
    """J of a convolution's weight, S = (O, C/g, *k), or (C, O/g, *k) where transposed.

    M images stand for each sample; their contributions are summed.
    """

    rule: ClassVar[str] = "convolution"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, M, O, *S')
    right: Tensor  # (B, M, C, *S)
    window: Geometry

    def geometry(self) -> dict[str, Any]:
        return asdict(self.window)

    @classmethod
    def read(
        cls,
        parameter: str,
        shape: tuple[int, ...],
        geometry: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Self:
        window = Geometry(
            kernel=tuple(geometry["kernel"]),
            stride=tuple(geometry["stride"]),
            padding=tuple(geometry["padding"]),
            dilation=tuple(geometry["dilation"]),
            groups=int(geometry["groups"]),
            transposed=bool(geometry["transposed"]),
        )
        return cls(parameter, shape, tensors["left"], tensors["right"], window)

    def narrow(self, samples: slice, outputs: slice) -> Convolution:
        return replace(self, left=self.left[outputs, samples], right=self.right[samples])

    def rows(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return self.left.new_empty(self.samples, self.outputs, 0, *self.shape[1:])
        part = self if self.window.groups > 1 else self._row_range(start, stop)
        out = self.left.new_empty(self.samples, self.outputs, *part.shape)
        part.write(out, accumulate=False)
        return out if part is not self else out[:, :, start:stop]

    def _row_range(self, start: int, stop: int) -> Convolution:
        shape = (stop - start, *self.shape[1:])
        if self.window.transposed:
            return replace(self, shape=shape, right=self.right[:, :, start:stop])
        return replace(self, shape=shape, left=self.left[:, :, :, start:stop])

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        Y, B, M = self.left.shape[:3]
        g, kernel = self.window.groups, self.window.kernel
        left = self.left.permute(1, 2, 0, *range(3, self.left.dim()))
        left = left.reshape(B * M, Y, g, -1, *left.shape[4:]).transpose(1, 2)
        right = self.right.reshape(B * M, g, -1, *self.right.shape[3:])
        if self.window.transposed:
            image = left.reshape(B * M * g, -1, *left.shape[4:])
            other = _padded_to_positions(
                right.reshape(B * M * g, -1, *right.shape[3:]), image, self.window
            )
            block = weight_gradient(image, other, self.window)
            block = block.view(B, M, g, other.shape[1], Y, -1, *kernel)
            block = block.sum(1) if M > 1 else block.select(1, 0)
            block = block.permute(0, 3, 1, 2, *range(4, block.dim()))
        else:
            image = right.reshape(B * M * g, -1, *right.shape[3:])
            other = left.reshape(B * M * g, -1, *left.shape[4:])
            if M == g == 1 and not accumulate and out.is_contiguous():
                flat = out.view(B, other.shape[1], image.shape[1], *kernel)
                weight_gradient(image, other, self.window, out=flat)
                return
            block = weight_gradient(image, other, self.window)
            block = block.view(B, M, g, Y, -1, image.shape[1], *kernel)
            block = block.sum(1) if M > 1 else block.select(1, 0)
            block = block.transpose(1, 2)
        target = out.view(block.shape)
        target.add_(block) if accumulate else target.copy_(block)

    def jvp(self, tangent: Tensor) -> Tensor:
        window, dims = self.window, len(self.window.kernel)
        right = self.right.flatten(0, 1)
        if window.transposed:
            # The sizes of the output settle what `output_padding` was.
            padding = _output_padding(right.shape[2:], self.left.shape[4:], window)
            function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            image = function(
                right,
                tangent,
                None,
                window.stride,
                window.padding,
                padding,
                window.groups,
                window.dilation,
            )
        else:
            convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
            image = convolve(
                right, tangent, None, window.stride, window.padding, window.dilation, window.groups
            )
        image = image.reshape(self.samples, -1)
        product = torch.einsum("ybn,bn->by", self.left.flatten(2), image)
        return self._from_rows_if_overflown(product, tangent)

    def vjp(self, cotangent: Tensor) -> Tensor:
        left = torch.einsum("by,ybn->bn", cotangent, self.left.flatten(2))
        left = left.reshape(-1, *self.left.shape[3:])
        right = self.right.flatten(0, 1)
        image, other = right, left
        if self.window.transposed:
            image, other = left, _padded_to_positions(right, left, self.window)
        return _backward(image, other, self.window, self.window.groups, self.shape)

    def projected_factors(self, projection: TwoSided) -> Outer | None:
        if self.window.groups > 1 or self.window.transposed:
            return None
        B, M = self.right.shape[:2]
        patches = _patches(self.right.flatten(0, 1), self.window).mT  # (B M, L, C ∏k)
        right = projection.of_columns(patches, self.parameter)
        right = right.reshape(B, M * right.shape[1], right.shape[2])
        left = self.left.flatten(4).transpose(3, 4).flatten(2, 3)  # (Y, B, M L, O)
        left, sizes = projection.of_rows(left, self.parameter), projection.sizes(self.shape)
        return Outer(self.parameter, sizes, left, right)


def _padded_to_positions(other: Tensor, image: Tensor, window: Geometry) -> Tensor:
    """Return `other` with zeros for the positions of the window that it lacks.

    An output padding of a stride or more, which a dilation allows, has room for further positions.
    """
    missing = [
        positions - size
        for positions, size in zip(
            _positions(image.shape[2:], window), other.shape[2:], strict=True
        )
    ]
    if not any(missing):
        return other
    return F.pad(other, [side for size in reversed(missing) for side in (0, size)])


def _positions(sizes: Sequence[int], window: Geometry) -> list[int]:
    """Return how many positions the window has along each dim of an image of these sizes."""
    dims = zip(sizes, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in dims
    ]


def _output_padding(
    sizes: tuple[int, ...], out_sizes: tuple[int, ...], window: Geometry
) -> list[int]:
    dims = zip(
        sizes, out_sizes, window.kernel, window.stride, window.padding, window.dilation, strict=True
    )
    return [
        out - ((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1)
        for size, out, kernel, stride, padding, dilation in dims
    ]


def weight_gradient(
    image: Tensor, other: Tensor, window: Geometry, *, out: Tensor | None = None
) -> Tensor:
    """Return Σ over positions of `other` times the patches of `image`, (N, K, C, *k).

    Args:
        image: (N, C, *S), what the window slides over.
        other: (N, K, *S'), one number for each position of the window.
        out: where to write the result.
    """
    if prod(window.kernel) == 1 or prod(other.shape[2:]) < other.shape[1]:
        return _unfolded(image, other, window, out)
    return _grouped(image, other, window, out)


def _backward(
    image: Tensor, other: Tensor, window: Geometry, groups: int, shape: tuple[int, ...]
) -> Tensor:
    weight = image.new_empty(1).expand(shape)
    gradients = torch.ops.aten.convolution_backward(
        other, image, weight, None, window.stride, window.padding, window.dilation, False,
        [0] * len(window.kernel), groups, [False, True, False],
    )  # fmt: skip
    result: Tensor = gradients[1]
    return result


def _grouped(image: Tensor, other: Tensor, window: Geometry, out: Tensor | None) -> Tensor:
    N, C, K = image.shape[0], image.shape[1], other.shape[1]
    # By way of one dim: the stride of a single position may make torch take channels for the last.
    block = _backward(
        image.flatten().view(1, N * C, *image.shape[2:]),
        other.reshape(1, N * K, *other.shape[2:]),
        window,
        N,
        (N * K, C, *window.kernel),
    ).view(N, K, C, *window.kernel)
    return block if out is None else out.copy_(block)


def _unfolded(image: Tensor, other: Tensor, window: Geometry, out: Tensor | None) -> Tensor:
    N, C, K = image.shape[0], image.shape[1], other.shape[1]
    left, right = other.flatten(2), _patches(image, window).mT
    if out is None:
        return torch.bmm(left, right).view(N, K, C, *window.kernel)
    torch.bmm(left, right, out=out.view(N, K, C * prod(window.kernel)))
    return out


def _patches(image: Tensor, window: Geometry) -> Tensor:
    """Return what the window covers at each position, (N, C·∏k, L)."""
    kernel, dims = window.kernel, len(window.kernel)
    if prod(kernel) == 1 and not any(window.padding):
        every = (slice(None, None, stride) for stride in window.stride)
        return image[(slice(None), slice(None), *every)].flatten(2)
    if dims == 2:
        return F.unfold(image, kernel, window.dilation, window.padding, window.stride)
    if dims == 1:
        lifted = image.unsqueeze(2)
        return F.unfold(
            lifted, (1, *kernel), (1, *window.dilation), (0, *window.padding), (1, *window.stride)
        )
    padded = F.pad(image, [side for size in reversed(window.padding) for side in (size, size)])
    positions = _positions(image.shape[2:], window)
    moves = padded.stride()[2:]
    strides = [
        *padded.stride()[:2],
        *(move * dilation for move, dilation in zip(moves, window.dilation, strict=True)),
        *(move * stride for move, stride in zip(moves, window.stride, strict=True)),
    ]
    seen = padded.as_strided([*image.shape[:2], *kernel, *positions], strides)
    return seen.reshape(image.shape[0], image.shape[1] * prod(kernel), prod(positions))
