"""Pooling that was undone: values go back to the places that `return_indices` found.

The kernel of `F.max_unpool2d` writes where the indices point. Recorded, it is a scatter, which
checks them.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn

from gradbox.tracing.torch_modules.assertions import of_rank, record_assertion


def max_unpool(module: Any, input: Any, indices: Any, output_size: Any = None) -> Any:
    """Record nn.MaxUnpool1d, 2d or 3d of a batch."""
    dims = _DIMS[type(module)]
    of_rank(dims + 2)(module, input)
    kernel, stride, padding = (
        value if isinstance(value, tuple) else (value,) * dims
        for value in (module.kernel_size, module.stride, module.padding)
    )
    sizes = [(input.size(2 + d) - 1) * stride[d] + kernel[d] - 2 * padding[d] for d in range(dims)]
    if output_size is not None:
        asked = [output_size[d - dims] for d in range(dims)]
        for d in range(dims):
            fits = (asked[d] > sizes[d] - stride[d]) & (asked[d] < sizes[d] + stride[d])
            record_assertion(fits, f"{type(module).__name__}: expected another output_size")
        sizes = asked
    batch, channels = input.size(0), input.size(1)
    places = input.new_zeros((batch, channels, prod(sizes)))
    filled = places.scatter(-1, indices.flatten(2), input.flatten(2))
    return filled.reshape((batch, channels, *sizes))


_DIMS = {nn.MaxUnpool1d: 1, nn.MaxUnpool2d: 2, nn.MaxUnpool3d: 3}
