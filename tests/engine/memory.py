"""How many bytes of tensors a function holds at its peak, as torch's allocator counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """Run a function and return the largest number of bytes allocated since it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
