"""On which devices the ranges of a job run; whoever runs the job leads the others.

A computation asks which ranges its shards are cut into and which devices run them, and is the same
for one device and for many. `ALONE` is one range, here. The cluster has the other kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from gradbox.protocol import InputGroup
from gradbox_engine import Observer
from gradbox_engine.ranges import Devices, HeldJob, OneDevice, Range
from gradbox_engine.ranges.samples import SampleDevices, SampleRanges, SampleRun
from gradbox_engine.requests import RangeRun
from gradbox_worker.computations.checkpoints import RowsInPlace
from gradbox_worker.computations.dense_rows import RowsFile
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.result_in_memory import ResultPlace
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.stores.rows import RowBlock
from gradbox_worker.stores.scoring import Question, Scores, scores_of

Run = RangeRun | SampleRun


class Rows(RowsFile, RowsInPlace, Protocol):
    """The file of dense rows, to be written and to be gone on with."""


class LedSamples(SampleDevices, Observer, Protocol):
    """The devices of a per-sample job."""


class Leading(Protocol):
    """The devices of one attempt at a job, as the computation that leads them sees them."""

    def begin(self, result: ResultPlace) -> Rows:
        """Have the others make themselves ready; return where this device's dense rows go."""

    def watched(self, observer: Observer) -> Observer:
        """Return who hears of this device's shards, in place of who watches the job."""

    def parts(
        self, groups: Sequence[InputGroup], tensors: BlobTensors, *, by_samples: bool = False
    ) -> tuple[Range, ...]:
        """Return the ranges that the shards of some groups are cut into.

        Args:
            tensors: what the shards are of.
            by_samples: by their samples as much as by their bytes.
        """

    def devices(self, held: HeldJob) -> Devices:
        """Return the devices of a job in two phases, which is `held` on this one."""

    def sample_devices(
        self, own: SampleRanges, *, device: torch.device, rounding: RoundedGradients
    ) -> LedSamples:
        """Return the devices of a per-sample job, which also hear how far all of them are.

        Args:
            own: the job on this device.
            device: where what they give is joined.
            rounding: told of what they round.
        """

    def scored(self, question: Question, blocks: Sequence[RowBlock], observer: Observer) -> Scores:
        """Return what is asked of a store's rows; the observer hears of blocks of this device."""

    def facts(self, runs: Sequence[Run]) -> Mapping[str, Any]:
        """Return what the receipt says of devices and ranges."""

    def alone(self) -> Leading:
        """Give the other devices back, and return what runs the job here."""


class Alone:
    """One device, which runs a job in one range."""

    def begin(self, result: ResultPlace) -> Rows:
        """Return the file itself."""
        return result

    def watched(self, observer: Observer) -> Observer:
        """Return the same."""
        return observer

    def parts(
        self, groups: Sequence[InputGroup], tensors: BlobTensors, *, by_samples: bool = False
    ) -> tuple[Range, ...]:
        """Return one range."""
        return (Range(0, 1, 0, sum(len(group.shards) for group in groups)),)

    def devices(self, held: HeldJob) -> Devices:
        """Return this one."""
        return OneDevice(held)

    def sample_devices(
        self, own: SampleRanges, *, device: torch.device, rounding: RoundedGradients
    ) -> LedSamples:
        """Refuse: a per-sample job on one device is no job in ranges."""
        raise NotImplementedError

    def scored(self, question: Question, blocks: Sequence[RowBlock], observer: Observer) -> Scores:
        """Score all blocks."""
        return scores_of(question, blocks, observer)

    def facts(self, runs: Sequence[Run]) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def alone(self) -> Leading:
        """Return the same."""
        return self


ALONE: Final = Alone()
