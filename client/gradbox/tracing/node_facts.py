"""What the operation of a node says about a value that is not known yet."""

from __future__ import annotations

import operator
from typing import Final

from torch.fx import Node

from gradbox.graphs import allow_list, targets

# What of a tensor is its form. Its device is known.
_FORMS: Final = frozenset(
    (
        *"dim dtype is_complex is_floating_point ndim ndimension nelement numel shape size".split(),
        targets.FUNCTIONS[allow_list.LENGTH],
    )
)
# How torch names the number of pieces, or their sizes, that it is to cut a tensor into.
_PIECES: Final = frozenset(
    "chunks indices sections split_size split_size_or_sections split_sizes".split()
)


def is_form(node: Node) -> bool:
    """Tell whether a value is made of tensors' ranks, sizes and dtypes alone."""
    asked = node.args[1] if node.target is getattr else node.target
    if asked in _FORMS:
        return True
    of_python = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return of_python and node.target is not getattr and all(map(is_form, node.all_input_nodes))


def num_entries(node: Node) -> int | None:
    """Return how many entries a node asks for, as pieces or by a slice; None if it does not say."""
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return _num_sliced(node.args[1])
    return num_pieces(node)


def num_pieces(node: Node) -> int | None:
    """Return into how many pieces a node cuts a tensor; None if it does not say."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = (value for key, value in node.kwargs.items() if key in _PIECES)
    asked = node.args[1] if len(node.args) > 1 else next(named, None)
    if isinstance(asked, int):
        return asked if name in ("chunk", "tensor_split") else None
    if name in ("split", "split_with_sizes", "tensor_split") and isinstance(asked, list | tuple):
        return len(asked) + (name == "tensor_split")
    return None


def _num_sliced(asked: slice) -> int | None:
    """Return how many entries `value[-4:]` or `value[1:5]` has where the value has enough."""
    start, stop = asked.start or 0, asked.stop
    if asked.step is not None or not isinstance(start, int):
        return None
    if stop is None:
        return -start if start < 0 else None
    return max(stop - start, 0) if isinstance(stop, int) and (start < 0) == (stop < 0) else None
