"""What changed between two looks of one listener, as small JSON documents.

Rows are sent whole where anything in them is new. A place in the queue is not part of a row, for a
job that begins moves all that wait: the keys of those that wait are sent in order instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from gradbox.protocol import BoxChange, BoxView

# A document is not made longer than this by one more row.
MAX_BYTES: Final = 1900

Row = tuple[str, str]


class News:
    """Remembers what a listener was told."""

    def __init__(self, view: BoxView) -> None:
        """Begin with what it was told first."""
        self._rows = _rows(view)
        self._queue = _queue(view)

    def since(self, view: BoxView) -> Iterator[str]:
        """Yield the changes from the last view to this one, each a `BoxChange` in JSON."""
        before, self._rows = self._rows, _rows(view)
        document = _Document()
        for row, text in self._rows.items():
            if before.get(row) != text:
                yield from document.add(row[0], text)
        for kind, name in before.keys() - self._rows.keys():
            yield from document.add(f"gone_{kind}", json.dumps(name))
        yield from document.end()
        queue_before, self._queue = self._queue, _queue(view)
        if self._queue != queue_before:
            yield self._queue


class _Document:
    """A document in the making, which begins anew where it would become too long."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}
        self._num_bytes = 0

    def add(self, field: str, text: str) -> Iterator[str]:
        if self._num_bytes + len(text.encode()) > MAX_BYTES:
            yield from self.end()
        self._parts.setdefault(field, []).append(text)
        self._num_bytes += len(text.encode()) + len(field) + 6

    def end(self) -> Iterator[str]:
        if self._parts:
            fields = [f'"{field}":[{",".join(texts)}]' for field, texts in self._parts.items()]
            yield "{" + ",".join(fields) + "}"
        self._parts, self._num_bytes = {}, 0


def _rows(view: BoxView) -> dict[Row, str]:
    rows: dict[Row, str] = {}
    for job in view.jobs:
        rows["jobs", job.key] = job.model_dump_json(exclude={"position"}, exclude_defaults=True)
    for device in view.devices:
        rows["devices", device.worker] = device.model_dump_json()
    for model in view.models:
        rows["models", model.name] = model.model_dump_json()
    return rows


def _queue(view: BoxView) -> str:
    waiting = [job.key for job in view.jobs if job.position is not None]
    change = BoxChange(queue=waiting, num_running=view.num_running, num_queued=view.num_queued)
    return change.model_dump_json(exclude_none=True, exclude_defaults=True)
