"""Arguments that have a rule of their own, found whether they are given by keyword or by position.

torch's builtin functions take them by keyword only, but for attention. Those
that are written in Python take them by position as well, and `PLACES` says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gradbox.graphs.allow_list import WRITING_FUNCTIONS

_FUNCTIONAL: Final = "torch.nn.functional."
PLACES: Final[dict[str, dict[str, int]]] = {
    "torch.norm": {"out": 4},
    "torch.tensordot": {"out": 3},
    _FUNCTIONAL + "embedding": {"max_norm": 3},
    _FUNCTIONAL + "multi_head_attention_forward": {"dropout_p": 10},
    _FUNCTIONAL + "normalize": {"out": 4},
    _FUNCTIONAL + "scaled_dot_product_attention": {"dropout_p": 4},
    **{
        _FUNCTIONAL + name: {"inplace": place}
        for place, names in (
            (1, "hardsigmoid hardswish mish relu relu6 selu silu"),
            (2, "celu elu leaky_relu"),
            (3, "hardtanh threshold"),
        )
        for name in names.split()
    },
}


def argument(name: str, target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of that name in a call of a function of the allow-list, or None."""
    if name in kwargs:
        return kwargs[name]
    place = PLACES.get(target or "", {}).get(name, len(args))
    return args[place] if place < len(args) else None


def function_writes(target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call of a function of the allow-list may write into one of its arguments.

    An `inplace` that is known only when the graph runs may be true.
    """
    in_place = argument("inplace", target, args, kwargs) not in (None, False)
    return in_place or target in WRITING_FUNCTIONS
