"""`isinstance`, `callable` and `torch.is_tensor` while a function is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch.fx import Proxy

from gradbox.tracing.bytecode import passing_truth
from gradbox.tracing.source_location import is_user_code, untraceable

# Its code asks in order to give numbers the dtype of the tensors beside them.
_DISTRIBUTIONS: Final = str(Path(torch.distributions.__file__).parent)


def type_test(known: Callable[..., bool]) -> Callable[..., bool]:
    """Stand for `isinstance`, which would say False of a symbol whatever it stands for.

    And for `callable`, which would say True. Torch's own code asks it of symbols as well, and is
    answered. An argument is a tensor. So, for all that can be known, is what a check takes for one
    that raises otherwise.
    """

    def test(value: Any, *kinds: Any) -> bool:
        if not issubclass(type(value), Proxy):
            return known(value, *kinds)
        asked_by = sys._getframe(1)
        filename = asked_by.f_code.co_filename
        if not is_user_code(filename):
            answered = filename.startswith(_DISTRIBUTIONS) and _of_a_tensor(known, *kinds)
            return answered or known(value, *kinds)
        of_tensor = _of_a_tensor(known, *kinds)
        if of_tensor is not None and _is_argument(value):
            return of_tensor
        if of_tensor and passing_truth(asked_by, called=True):
            return True
        raise untraceable(
            f"{known.__name__}() asks for the type of a value that is not known yet",
            "decide outside the function, or by an argument with a Python value",
        )

    return test


def _is_argument(symbol: Any) -> bool:
    return symbol.node.op == "placeholder" and not symbol.tracer.structured


def _of_a_tensor(known: Callable[..., bool], kinds: Any = None) -> bool | None:
    """Return the answer for a tensor; None if it depends on its dtype or class."""
    if known.__name__ == "is_tensor":
        return True
    if known.__name__ != "isinstance":
        return None
    if issubclass(torch.Tensor, kinds):
        return True
    narrower = (type(torch.LongTensor), type(torch.nn.Parameter))
    listed = kinds if isinstance(kinds, tuple) else get_args(kinds) or (kinds,)
    return None if any(isinstance(kind, narrower) for kind in listed) else False
