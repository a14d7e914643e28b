"""The large tensors that a client has sent to its box: where each lies, and which names change.

A tensor is a blob of its own the first time, so that whoever has sent the same numbers before sends
nothing. Weights that a training loop changes would then be a request each in every step; so what
has been sent under its name before, with other numbers, travels in one blob with all that changed
beside it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from gradbox.protocol import TensorRef

# Those of the last steps; one that was forgotten is sent again.
MOST_TENSORS: Final = 10_000


class SentTensor(NamedTuple):
    """A tensor on its way to the box.

    `name` is what the job calls it, and `digest` that of a blob which holds it alone.
    """

    name: str
    digest: str
    ref: TensorRef


class KnownTensors:
    """What one client knows of the tensors on its box. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: OrderedDict[str, TensorRef] = OrderedDict()  # by digest
        self._names: set[str] = set()

    def ref(self, digest: str) -> TensorRef | None:
        """Return where a tensor lies on the box; None if it was not sent."""
        with self._lock:
            found = self._refs.get(digest)
            if found is not None:
                self._refs.move_to_end(digest)
            return found

    def was_sent(self, name: str) -> bool:
        """Tell whether a tensor was sent under this name before."""
        with self._lock:
            return name in self._names

    def note(self, tensors: Iterable[SentTensor]) -> None:
        """Remember tensors: the box has taken a job that names them."""
        with self._lock:
            for tensor in tensors:
                self._refs[tensor.digest] = tensor.ref
                self._refs.move_to_end(tensor.digest)
                self._names.add(tensor.name)
            while len(self._refs) > MOST_TENSORS:
                self._refs.popitem(last=False)

    def forget(self) -> None:
        """Know of none: some were removed from the box."""
        with self._lock:
            self._refs.clear()
            self._names.clear()
