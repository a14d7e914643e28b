"""What a graph that writes in place works on: copies, so that nobody else's tensors change.

A copy is made under the caller's grad mode, whatever mode the graph is in where it first reads the
tensor; made under `torch.no_grad()` it would cut the tensor's gradient off for all later steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Copies:
    """The copies of one run. A tensor that two arguments hold has one copy.

    Args:
        grad_enabled: the caller's grad mode.
    """

    def __init__(self, *, grad_enabled: bool) -> None:
        self._grad_enabled = grad_enabled
        # Each with its original, which is kept so that its id stays its own.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Return a value with copies in place of all tensors in it, at any depth."""
        if isinstance(value, torch.Tensor):
            return self._copy(value)
        if isinstance(value, Mapping):
            return _Copied(value, self)
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return self._tuple(value)
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with torch.set_grad_enabled(self._grad_enabled):
                self._made[id(tensor)] = (tensor, tensor.clone())
        return self._made[id(tensor)][1]

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.of(item) for item in value]
        if hasattr(value, "_make"):  # a named tuple
            return value._make(items)  # type: ignore[no-any-return]
        return type(value)(items) if hasattr(value, "n_fields") else tuple(items)


def uncopied(result: Any) -> Any:
    """Return what a graph returns as the caller knows it: a mapping of copies as a dict."""
    return dict(result) if isinstance(result, _Copied) else result


class _Copied(Mapping[Any, Any]):
    """A mapping whose entries are copied when they are read.

    A view rather than a new mapping of the same type, since a model's own output class may be
    built and indexed in ways of its own (by position, too).
    """

    def __init__(self, original: Mapping[Any, Any], copies: Copies) -> None:
        self._original = original
        self._copies = copies

    def __getitem__(self, key: Any) -> Any:
        return self._copies.of(self._original[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._original)

    def __len__(self) -> int:
        return len(self._original)
