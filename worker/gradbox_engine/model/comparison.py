"""Whether a second call repeats the first: the assumption that the whole method rests on."""

from __future__ import annotations

import torch
from torch import Tensor

from gradbox_engine.errors import ReplayMismatch
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.host_copy import HostCopy
from gradbox_engine.model.precision import replay_tolerance
from gradbox_engine.model.tensor_equality import same_values
from gradbox_engine.requests import Precision

SKETCH_ENTRIES = 4096
"""How many entries of a tensor are kept at equal distances, where all of it would take memory."""


def sketch(outputs: Outputs) -> Outputs:
    """Return copies of some entries of each output."""
    sketched = {}
    for name, value in outputs.items():
        flat = value.detach().flatten()
        sketched[f"v/{name}"] = flat[:: max(1, flat.numel() // SKETCH_ENTRIES)].clone()
    return sketched


def relative_difference(again: Tensor, first: Tensor) -> Tensor:
    """Return max |again − first| / max |first| as a 0-dim tensor on the device.

    Entries that are both NaN, or the same infinity, are equal; only one of them NaN is an infinite
    difference, and so is any difference from zeros.
    """
    if first.numel() == 0 or again.shape != first.shape:
        same = again.shape == first.shape
        return torch.full((), 0.0 if same else torch.inf, device=first.device)
    equal = (again == first) | (again.isnan() & first.isnan())
    differences = (again - first).abs().masked_fill_(equal, 0.0)
    largest = differences.nan_to_num_(nan=torch.inf).amax()
    size = first.abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).amax()
    return torch.where(largest == 0, 0.0, largest / size).float()


class ReplayComparison:
    """Compares each replayed shard with its first pass, without waiting for the device."""

    def __init__(self, precision: Precision, *, largest: float = 0.0) -> None:
        self.largest = largest
        self._precision = precision
        self._pending: list[tuple[str, float, HostCopy]] = []

    def compare(self, where: str, again: Outputs, first: Outputs) -> None:
        """Compare one shard, and check those compared before whose result is on the host."""
        if _same_bits_on_cpu(again, first):
            return
        for name, tensor in first.items():
            tolerance = replay_tolerance(self._precision, tensor.dtype)
            if name not in again:
                raise ReplayMismatch(
                    f"{where}: the replay returned no {name!r}, the first pass did"
                )
            with torch.no_grad():
                difference = HostCopy(relative_difference(again[name].detach(), tensor))
            self._pending.append((where, tolerance, difference))
        while self._pending and self._pending[0][2].done:
            self._check(*self._pending.pop(0))

    def finish(self) -> float:
        """Wait for all comparisons and return the largest difference.

        Raises:
            ReplayMismatch: a shard differs by more than its dtype's tolerance.
        """
        while self._pending:
            self._check(*self._pending.pop(0))
        return self.largest

    def _check(self, where: str, tolerance: float, copied: HostCopy) -> None:
        difference = copied.value().item()
        self.largest = max(self.largest, difference)
        if difference > tolerance:
            raise ReplayMismatch(
                f"{where}: expected the replay to repeat the first pass within {tolerance:.0e} of "
                f"max |z|, got {difference:.1e}; the model keeps state that is neither a buffer "
                f"nor a global random generator (a generator of its own, a counter in an object, a "
                f"cache): move it into a buffer, or switch it off"
            )


def _same_bits_on_cpu(again: Outputs, first: Outputs) -> bool:
    """Return whether two outputs are equal in every entry, where asking costs no wait."""
    return again.keys() == first.keys() and all(
        z.device.type == "cpu" and same_values(again[name], z) for name, z in first.items()
    )
