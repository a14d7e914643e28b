"""Where dense results go: memory that is kept, a caller's buffers, or a sink that takes pieces.

Fresh pages cost more than the arithmetic that fills them (0.3–6 GB/s against 24–35 for memory that
is used again), so an arena is allocated once and kept. Results in it are views: the next use of the
arena overwrites them.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from gradbox_factors import Lookup, Term

ALIGNMENT = 64
HUGE_PAGE = 2 * 2**20

Region = tuple[int, int, int, int]
"""First sample and the one behind the last, first output and the one behind the last."""


class Sink(Protocol):
    """Takes a dense result in pieces, for instance into a file that is written in place."""

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Told every parameter's (B, Y, *shape) and dtype before the first piece."""

    def write(self, name: str, at: tuple[slice, slice, slice], piece: Tensor) -> None:
        """Take the piece (b, y, r, ...) at samples, outputs and rows of the parameter's dim 0.

        The piece is only lent: its memory is used again. For a 0-dim parameter rows are 0:1.
        """


class Arena:
    """One buffer, kept and grown, that holds the arrays of all parameters one after another.

    A region that holds an embedding's gradient stays zero but for the rows it touched, so only
    those are cleared for the next result that is cut alike. What is known of a region is forgotten
    when another cut, or someone who holds a result, writes there.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._layout: tuple[Any, ...] = ()
        self._views: dict[str, Tensor] = {}
        self._touched: dict[str, dict[Region, Lookup]] = {}  # regions of one name lie apart
        self._version = 0  # of the buffer after our last write

    def begin(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> dict[str, Tensor]:
        """Return views of the given shapes; what they hold is settled when they are written."""
        layout = (dict(shapes), dict(dtypes), device)
        if self._layout == layout:
            return self._views
        sizes = {
            name: -(-_numel(shape) * dtypes[name].itemsize // ALIGNMENT) * ALIGNMENT
            for name, shape in shapes.items()
        }
        total = sum(sizes.values())
        if self._buffer is None or self._buffer.numel() < total or self._buffer.device != device:
            self._buffer = None  # let go of the old one before asking for the new
            self._buffer = _fresh(total, device)
        self._views, at = {}, 0
        for name, shape in shapes.items():
            size = _numel(shape) * dtypes[name].itemsize
            region = self._buffer[at : at + size].view(dtypes[name])
            self._views[name] = region.view(shape)
            at += sizes[name]
        self._layout = layout
        self._touched.clear()
        return self._views

    def put(self, term: Term, samples: slice, outputs: slice) -> None:
        """Write a term into its region."""
        out = self._views[term.parameter]
        if (samples.stop - samples.start, outputs.stop - outputs.start) != out.shape[:2]:
            out = out[samples, outputs]
        region = (samples.start, samples.stop, outputs.start, outputs.stop)
        before = self._forgotten(term.parameter, region)
        if not isinstance(term, Lookup):
            term.write(out, accumulate=False)
        else:
            if before is not None:
                before.clear(out)
            else:
                out.zero_()
            term.add_to(out)
            self._touched.setdefault(term.parameter, {})[region] = term
        self._version = out._version

    def _forgotten(self, name: str, region: Region) -> Lookup | None:
        """Forget what lies in a region that is about to be written; return what was exactly it."""
        out = self._views[name]
        if out._version != self._version:
            self._touched.clear()
        regions = self._touched.get(name)
        if not regions:
            return None
        exactly = regions.pop(region, None)
        if exactly is None:
            for other in [other for other in regions if _overlap(other, region)]:
                del regions[other]
        return exactly


def _overlap(one: Region, other: Region) -> bool:
    first, last, top, bottom = one
    return first < other[1] and other[0] < last and top < other[3] and other[2] < bottom


def _fresh(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes; on a Linux host in huge pages, which are written faster ever after.

    The mapping is private: shared pages, Python's default, are never huge unless the whole machine
    is set so.
    """
    if device.type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    # One page more than asked for, so that the region can begin where a huge page does.
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size]


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
