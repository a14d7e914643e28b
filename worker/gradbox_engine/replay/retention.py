"""Which shards' graphs are kept from the first pass, so that they need no replay.

With everything kept a job costs one forward and one backward of every shard, with nothing kept a
forward more; between, the cost is linear in the number of shards that are kept.

The budget is in bytes of memory. A shard's graph takes about HELD_FACTOR times the bytes of its
saved tensors: the rest is nodes, rounding by the allocator, and what custom functions keep aside.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Hashable
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from gradbox_engine.replay.saved_tensors import SavedTensors

K = TypeVar("K")
V = TypeVar("V")

Retain = int | Literal["auto"]

Form = tuple[Hashable, ...]
"""What the graphs of two shards have in common that can be expected to be of one size."""

AMPLE = 4
"""Graphs of one form may differ by what a model leaves out at random, not by this much."""

MOST_KNOWN = 1024
MOST_SETTINGS = 64
"""Forms, and settings of a model, that are remembered from job to job."""

_known_by_model: WeakKeyDictionary[nn.Module, dict[Hashable, dict[Form, int]]]
_known_by_model = WeakKeyDictionary()

HELD_FACTOR = 1.3
CUDA_RESERVE = 0.1
HOST_RESERVE = 0.5
"""Parts of what is free that "auto" leaves alone. On the host it leaves more: there other programs
share the memory, and running out ends the process instead of raising."""

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Limit, use, statistics and what of the use is cached files, in versions 2 and 1."""


class OlderGraphs(Protocol):
    """Graphs of earlier passes, which give way to newer ones."""

    @property
    def num_bytes(self) -> float:
        """What they take, about; 0 once there are none."""

    @property
    def newest_bytes(self) -> int:
        """Saved tensors of the one that was kept last."""

    def drop_oldest(self) -> None:
        """Let go of one of them, if there is any."""


class NoneOlder:
    """There are none."""

    num_bytes: Final = 0.0
    newest_bytes: Final = 0

    def drop_oldest(self) -> None: ...


NONE_OLDER: Final = NoneOlder()


class GraphBudget:
    """Decides, shard by shard, whether the next graph may be kept, and whether it is measured.

    Measuring takes 2 to 3 % of a shard of 80 ms. It decides nothing where there is room for AMPLE
    times what all shards to come would take; then those of a form that was measured before, in this
    job or in an earlier one, are counted like it.

    `unmeasured` is set once the model turns out to differentiate in its own forward pass: such
    graphs can be neither emptied nor measured, and only the last shard's is kept.
    """

    def __init__(
        self,
        total_bytes: float,
        *,
        with_headroom: bool = False,
        older: OlderGraphs = NONE_OLDER,
        known: dict[Form, int] | None = None,
    ) -> None:
        """Begin with nothing held.

        Args:
            total_bytes: memory that kept graphs may take, beside the older ones.
            with_headroom: whether one more shard's graph, that of the replay running beside
                them, comes out of the same memory.
            older: their memory is added as they have to go, one after the other.
            known: bytes of graphs by form, from earlier jobs; see `remember`.
        """
        self._total_bytes = total_bytes
        self._with_headroom = with_headroom
        self._older = older
        self._held_bytes = 0
        self._latest_bytes = 0
        self._known = {} if known is None else known
        self._bytes_by_form: dict[Form, int] = {}
        self._expected = ChainMap(self._bytes_by_form, self._known)
        self.unmeasured = False

    def room_bytes(self) -> float:
        """Return how many bytes of saved tensors the next shard may keep; 0 for none at all."""
        # As large as the shard before, most likely: not worth beginning to keep what will not fit.
        while (before := self._older.num_bytes) and not self._room_for(
            max(self._latest_bytes, self._older.newest_bytes)
        ):
            self._older.drop_oldest()
            self._total_bytes += before - self._older.num_bytes
        return self._room_for(self._latest_bytes)

    def _room_for(self, expected_bytes: int) -> float:
        free_bytes = self._total_bytes / HELD_FACTOR - self._held_bytes
        if self._with_headroom:
            free_bytes -= expected_bytes
        return free_bytes if free_bytes > 0 and free_bytes >= expected_bytes else 0

    def count(self, saved: SavedTensors, form: Form | None = None) -> None:
        """Take note of what a shard has kept, or of how far it came before it was too much."""
        if not saved.kept and not saved.num_bytes:
            return
        self._latest_bytes = max(saved.num_bytes, 1)
        if saved.kept:
            self._held_bytes += saved.num_bytes
            if form is not None:
                self._bytes_by_form[form] = self._latest_bytes

    def count_like(self, form: Form) -> int:
        """Take note of a shard that was kept unmeasured, and return its bytes."""
        num_bytes = self._bytes_by_form[form] = self._expected[form]
        self._held_bytes += num_bytes
        return num_bytes

    def is_ample(self, form: Form | None, num_left: int) -> bool:
        """Return whether a shard of this form can be kept unmeasured, and those after it."""
        if self.unmeasured or form is None or form not in self._expected:
            return False
        largest = max([self._expected[form], *self._bytes_by_form.values()])
        return self.room_bytes() >= AMPLE * num_left * largest

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to remember."""
        return bool(self._bytes_by_form)

    def remember(self) -> None:
        """Let later jobs know the bytes of the forms that came."""
        self._known.update(self._bytes_by_form)
        forget_oldest(self._known, MOST_KNOWN)

    def release(self) -> None:
        """Take note that all graphs are gone."""
        self._held_bytes = 0

    def exhaust(self) -> None:
        """Keep nothing from here on."""
        self._total_bytes, self._older = 0, NONE_OLDER


def known_bytes(model: nn.Module, setting: Hashable) -> dict[Form, int]:
    """Return what jobs in this setting know of the bytes of a model's graphs, to be added to.

    Args:
        setting: everything beside a shard's form that its graph may depend on.
    """
    by_setting = _known_by_model.setdefault(model, {})
    known = by_setting[setting] = by_setting.pop(setting, {})
    forget_oldest(by_setting, MOST_SETTINGS)
    return known


def forget_oldest(known: dict[K, V], most: int) -> None:
    """Leave no more than the entries that came last."""
    for key in list(known)[:-most]:
        del known[key]


def graph_budget(
    retain: Retain,
    device: torch.device,
    *,
    sums_bytes: int,
    overlay_bytes: int = 0,
    older: OlderGraphs = NONE_OLDER,
    known: dict[Form, int] | None = None,
) -> GraphBudget:
    """Return the budget that `retain` stands for on a device.

    Args:
        sums_bytes: what the sums of gradients will take, which "auto" leaves free.
        overlay_bytes: what the graphs hold beside what they saved.
        older: graphs that the budget has to do for, too.
        known: bytes of graphs by form, from earlier jobs.
    """
    if retain == "auto":
        total_bytes = _free_bytes(device) - sums_bytes - overlay_bytes
        return GraphBudget(total_bytes, with_headroom=True, older=older, known=known)
    if retain == 0:
        return GraphBudget(0)
    total_bytes = retain - overlay_bytes - older.num_bytes
    return GraphBudget(total_bytes, older=older, known=known)


def _free_bytes(device: torch.device) -> float:
    """Return what is free on the device less a reserve; 0 where that cannot be known."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free_bytes + cached_bytes) * (1 - CUDA_RESERVE)
    if device.type == "cpu":
        return min(_available_bytes(), _cgroup_bytes()) * (1 - HOST_RESERVE)
    return 0


def _available_bytes() -> float:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_bytes() -> float:
    """Return what the process's control group (Linux) still admits; infinite without a limit."""
    for limit_file, used_file, statistics_file, files_field in CGROUP_FILES:
        try:
            limit = (CGROUP / limit_file).read_text().strip()
            used_bytes = int((CGROUP / used_file).read_text())
            statistics = (CGROUP / statistics_file).read_text().splitlines()
        except OSError:
            continue
        if limit == "max":
            return math.inf
        fields = dict(line.split() for line in statistics)
        return max(0, int(limit) - used_bytes + int(fields.get(files_field, 0)))
    return math.inf
