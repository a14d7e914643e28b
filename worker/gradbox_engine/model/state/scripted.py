"""The attributes of TorchScript's modules, which lie in C++ and are no entries of `vars`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

OF_TORCHSCRIPT = frozenset({"training", "_is_full_backward_hook"})


def scripted_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a scripted module binds names to, buffers too; nothing of any other module.

    A list or a dict comes as a copy.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return {}
    names = module._concrete_type.get_attributes().keys() - OF_TORCHSCRIPT
    return {name: module._c.getattr(name) for name in sorted(names)}


def bind(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Let a scripted module bind names to what `scripted_attributes` returned."""
    for name, value in attributes.items():
        module._c.setattr(name, value)  # type: ignore[operator, union-attr]
