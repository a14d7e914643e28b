"""Where a queued job stands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter


@dataclass(frozen=True)
class Place:
    """The place of one queued job.

    Attributes:
        position: 1 for the job that is handed out next.
        waiting_for: how many jobs of each owner run or come before; those with most jobs alone.
        begins_s: about when it begins, in seconds since 1970; None if nobody can say.
        hold: why no job that waits is handed to a worker, if none is.
    """

    position: int
    waiting_for: Mapping[str, int] = field(default_factory=dict)
    begins_s: float | None = None
    hold: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """About how long from now until it begins."""
        return None if self.begins_s is None else round(max(0.0, self.begins_s - time.time()), 1)

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> Place:
        """Raises:
        ValueError: these are not the bytes of a place.
        """
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Place)
