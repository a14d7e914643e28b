"""J Jᵀ of all samples, out of blocks J_r J_sᵀ of ranges r ≤ s, each computed once.

    ranges    0    1    2
        0     ■    ■    ■
        1     ᵀ    ■    ■        ᵀ: the transpose of the block on the other side
        2     ᵀ    ᵀ    ■

Factors stay on the devices that made them; a block moves those of one range to another's device.

Shapes: B samples over all ranges, b of one, Y outputs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges.coroutines import Coroutine, Losses, on_some_device, run_together
from gradbox_engine.ranges.protocol import Range
from gradbox_engine.ranges.samples.protocol import (
    RangeSamples,
    Rows,
    SampleDevice,
    SampleDevices,
    SampleTask,
)


class GramOfRanges:
    """The blocks of one Gram; rows that are lost with a device are made again."""

    def __init__(
        self,
        devices: SampleDevices,
        parts: Sequence[Range],
        tasks: Sequence[SampleTask],
        found: Sequence[RangeSamples],
        losses: Losses,
    ) -> None:
        """Take what ranges have made.

        Args:
            tasks: by which the rows of `found` were made.
        """
        self._devices, self._parts, self._tasks = devices, parts, tasks
        self._rows: list[Rows | None] = [samples.rows for samples in found]
        self._losses = losses

    def whole(self, *, trace: bool) -> Tensor:
        """Return J Jᵀ, (B, Y, B, Y), or its trace over outputs, (B, B).

        Raises:
            DeviceLost: no device is left, or one range has lost too many.
        """
        number = len(self._parts)
        missing = [(r, s) for r in range(number) for s in range(r, number)]
        blocks: dict[tuple[int, int], Tensor] = {}
        while missing:
            found = run_together([self._block(r, s, trace=trace) for r, s in missing])
            pairs = list(zip(missing, found, strict=True))
            blocks |= {pair: block for pair, block in pairs if isinstance(block, Tensor)}
            missing = [pair for pair, block in pairs if not isinstance(block, Tensor)]
            errors = [block for _, block in pairs if isinstance(block, DeviceLost)]
            if errors:
                self._make_again(missing, blocks, errors[0])
        for r, s in [(r, s) for r, s in blocks if r != s]:
            blocks[s, r] = blocks[r, s].permute((1, 0) if trace else (2, 3, 0, 1))
        over = 1 if trace else 2
        lines = [_cat([blocks[r, s] for s in range(number)], over) for r in range(number)]
        return _cat(lines, 0)

    def _block(self, r: int, s: int, *, trace: bool) -> Coroutine[Tensor | DeviceLost]:
        """Compute one block; return the error where rows are lost."""
        right = None if r == s else self._rows[s]
        try:
            block: Tensor = yield self._devices.gram(self._rows[r], right, trace=trace)
        except DeviceLost as error:
            return error
        return block

    def _make_again(
        self,
        missing: Sequence[tuple[int, int]],
        done: Container[tuple[int, int]],
        error: DeviceLost,
    ) -> None:
        """Compute lost rows again; where it cannot be told whose are lost, all that may be."""
        concerned = sorted({number for pair in missing for number in pair})
        lost = [number for number in concerned if (number, number) not in done] or concerned
        parts = [self._parts[number] for number in lost]
        for part in parts:
            self._losses.count(part, error)

        def call(device: SampleDevice, part: Range) -> Future[RangeSamples]:
            return device.run(part, self._tasks[part.index])

        found = run_together(
            [on_some_device(part, self._devices.take, call, self._losses) for part in parts]
        )
        for number, samples in zip(lost, found, strict=True):
            self._rows[number] = samples.rows


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
