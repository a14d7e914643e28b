"""The large tensors that a client has sent to its box: where each value lies, and which change.

A tensor is sent under its value the first time, so that whoever has sent the same one before sends
nothing. Weights that a training loop changes would then be a request each in every step; so what
has been sent before with another value travels in one blob with all that changed beside it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from gradbox.protocol import TensorRef

# The values of the last steps; one that was forgotten is sent again.
MOST_VALUES: Final = 10_000


class SentTensor(NamedTuple):
    """A tensor on its way to the box: what the job calls it, its value's digest, and its place."""

    name: str
    value: str
    ref: TensorRef


class KnownTensors:
    """What one client knows of the tensors on its box. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[str, TensorRef] = OrderedDict()
        self._names: set[str] = set()

    def place(self, value: str) -> TensorRef | None:
        """Return where a value lies, by its digest; None if it was not sent."""
        with self._lock:
            found = self._places.get(value)
            if found is not None:
                self._places.move_to_end(value)
            return found

    def changes(self, name: str) -> bool:
        """Tell whether a tensor was sent under this name before, so that a new value changed it."""
        with self._lock:
            return name in self._names

    def note(self, tensors: Iterable[SentTensor]) -> None:
        """Remember tensors: the box has taken a job that names them."""
        with self._lock:
            for tensor in tensors:
                self._places[tensor.value] = tensor.ref
                self._places.move_to_end(tensor.value)
                self._names.add(tensor.name)
            while len(self._places) > MOST_VALUES:
                self._places.popitem(last=False)

    def forget(self) -> None:
        """Know of none: some were removed from the box."""
        with self._lock:
            self._places.clear()
            self._names.clear()
