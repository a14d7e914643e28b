"""Notices the death of coordinators, which are processes of the pool's machine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)


class CoordinatorWatch:
    """The processes that have a lease, in one event loop."""

    def __init__(self, died: Callable[[str], None]) -> None:
        """Watch none yet.

        Args:
            died: called with the lease of a process that has died.
        """
        self._died = died
        self._descriptors: dict[str, int] = {}  # by lease

    def __contains__(self, lease: str) -> bool:
        """Return whether the process that has a lease is watched."""
        return lease in self._descriptors

    def begin(self, lease: str, pid: int) -> None:
        """Watch a process, once."""
        if lease in self._descriptors:
            return
        descriptor = self._descriptors[lease] = os.pidfd_open(pid)

        def died() -> None:
            log.warning("the coordinator %s of lease %s died", pid, lease)
            self._died(lease)

        asyncio.get_running_loop().add_reader(descriptor, died)

    def end(self, lease: str) -> None:
        """Watch it no more."""
        descriptor = self._descriptors.pop(lease, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
