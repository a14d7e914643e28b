"""The size that a transposed convolution is asked for, which it compares with its argument's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradbox.tracing.torch_modules.assertions import record_assertion


def output_padding(
    module: Any,
    input: Any,
    output_size: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    kernel_size: Sequence[int],
    num_spatial_dims: int,
    dilation: Sequence[int],
) -> list[Any]:
    """Record how much longer than its smallest the output is made along each dimension.

    With `output_size` it is between 0 and the stride: from the smallest size s (n - 1) + d (k - 1)
    + 1 - 2 p on, n being the argument's size, k the kernel's, s stride, d dilation, p padding.
    """
    if output_size is None:
        return list(module.output_padding)
    found = []
    for d in range(num_spatial_dims):
        last = d - num_spatial_dims
        reach = dilation[d] * (kernel_size[d] - 1) + 1
        smallest = (input.size(last) - 1) * stride[d] + reach - 2 * padding[d]
        more = output_size[last] - smallest
        message = f"{type(module).__name__}: expected an output_size within one stride of its size"
        record_assertion((more >= 0) & (more < stride[d]), message)
        found.append(more)
    return found
