"""Custom Functions, shown to the function modes that observe a model: torch does not show them.

Many make a weight of parameters alone: quantised, masked, of a few angles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import handle_torch_function

from gradbox_engine.model.kernels import replaced

_APPLY: Any = vars(Function)["apply"]


@dataclass(frozen=True)
class Apply:
    """`kind.apply`, equal to that of another call."""

    kind: type[Function]

    @property
    def __name__(self) -> str:
        return f"{self.kind.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _APPLY.__func__(self.kind, *args, **kwargs)


def custom_functions_shown() -> AbstractContextManager[None]:
    """Return a context in which modes see every call of a custom Function as one of an `Apply`."""
    return replaced(Function, "apply", _shown)


@classmethod  # type: ignore[misc]
def _shown(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    function = Apply(cls)
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(function, args, *args, **kwargs)
    return function(*args, **kwargs)
