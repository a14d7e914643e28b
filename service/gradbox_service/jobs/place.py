"""Where a queued job stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import TypeAdapter


@dataclass(frozen=True)
class Place:
    """The place of one queued job.

    Attributes:
        position: 1 for the job that is handed out next.
        waiting_for: how many jobs of each owner run or come before; those with most jobs alone.
        seconds_left: about how long until it begins; None if nobody can say.
    """

    position: int
    waiting_for: Mapping[str, int] = field(default_factory=dict)
    seconds_left: float | None = None

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> Place:
        """Raises:
        ValueError: these are not the bytes of a place.
        """
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Place)
