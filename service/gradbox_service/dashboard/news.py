"""What changed between two looks of one listener, as small JSON documents.

Rows are sent whole where anything in them is new. A job's place in the queue and when it begins are
not part of its row, for a job that begins moves all that wait: the keys of those that wait are sent
in order instead, and when each of them begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from gradbox.protocol import BoxChange, BoxView

# A document is not made longer than this by one more row.
MAX_BYTES: Final = 1900
# What a job that ends or begins changes of all that wait.
MOVED: Final = {"position", "begins_s"}

Row = tuple[str, str]


class News:
    """Remembers what a listener was told."""

    def __init__(self, view: BoxView) -> None:
        """Begin with what it was told first."""
        self._rows = _rows(view)
        self._lists = _lists(view)

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
        lists_before, self._lists = self._lists, _lists(view)
        yield from (text for text in self._lists if text not in lists_before)


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
        rows["jobs", job.key] = job.model_dump_json(exclude=MOVED, exclude_defaults=True)
    for device in view.devices:
        rows["devices", device.worker] = device.model_dump_json()
    for model in view.models:
        rows["models", model.name] = model.model_dump_json()
    return rows


def _lists(view: BoxView) -> list[str]:
    """Return the order of the queue, when its jobs begin, and what the owner says of the box."""
    waiting = [job for job in view.jobs if job.position is not None]
    keys = [job.key for job in waiting]
    changes = (
        BoxChange(queue=keys, num_running=view.num_running, num_queued=view.num_queued),
        BoxChange(begins_s=[job.begins_s and round(job.begins_s) for job in waiting]),
        BoxChange(operation=view.operation),
    )
    # Each whole: a page puts what it is told in the place of what it had.
    return [change.model_dump_json(include=change.model_fields_set) for change in changes]
