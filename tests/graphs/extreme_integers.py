"""Calls of every allowed operation with the integers at the ends of their dtypes.

`main()` makes them in this process as the box does, guarded, and prints the operation
before its calls: where a kernel ends the process, the last line names it.
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gradbox.errors import GraphRefused
from gradbox.graphs import allow_list
from gradbox_worker.interpreting.program import _function, _method

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OF_THE_GRAPH = {allow_list.FIELD, allow_list.ATTRIBUTE, allow_list.GRAD_MODE}
HOST_BYTES = 2**27  # beyond what this process has
# What a call may raise; a crash raises nothing.
REFUSALS = (
    ArithmeticError,
    AttributeError,
    AssertionError,
    GraphRefused,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in allow_list.FUNCTIONS:
        if name not in OF_THE_GRAPH:
            yield name, _function(name)
    for name in sorted(allow_list.METHODS):
        if f"torch.{name}" not in allow_list.FUNCTIONS:  # which has the same kernel
            yield f".{name}", _method(name)


def calls(dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments: each pair of extremes in long rows and with gaps, then as numbers."""
    info = torch.iinfo(dtype)
    ends = sorted({info.min, -1 if info.min else 1, 0, 1, info.max})
    pairs = torch.tensor(list(product(ends, ends)), dtype=dtype)
    one, other = pairs.repeat(8, 1).T.contiguous()  # longer than a vector register
    square = pairs[: len(ends) ** 2 // 2 * 2, 0].reshape(2, -1)
    yield from (((one,), {}), ((one, other), {}), (tuple(pairs.T), {}), ((square, square), {}))
    yield (one, other, one), {}
    for mode in ("trunc", "floor"):
        yield (one, other), {"rounding_mode": mode}
    if dtype not in (torch.int32, torch.int64):  # Python's numbers are of 64 bits
        return
    for end in (info.min, -1, info.max):
        yield from (((one, end), {}), ((one, torch.tensor(end, dtype=dtype)), {}))
        yield from (((square, end), {}), ((square.double(), end), {}), ((end, one), {}))
        yield (one, end), {"rounding_mode": "trunc"}
        yield from (((square, end, second), {}) for second in (info.min, -1, info.max))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + HOST_BYTES, taken + HOST_BYTES))
    for name, operation in operations():
        print(name, flush=True)
        for dtype in DTYPES:
            for args, kwargs in calls(dtype):
                own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                with suppress(REFUSALS):
                    operation(*own, **kwargs)
    print("done")


if __name__ == "__main__":
    main()
