"""Weights that are computed from others in every call: spectral norm and weight norm.

Spectral norm in train mode runs a power iteration under `torch.no_grad()` and writes it into the
buffers u and v. Recorded, it is the same iteration and the same writes: a loss that is called once
leaves u and v as one call leaves them, `result.loss_buffers` has them, and a module that is used
twice in a loss iterates twice, as locally. torch writes through `out=`, which no graph may hold.

Each has two forms: a parametrization, and the hook that came before it (`nn.utils.spectral_norm`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def power_method(module: Any, weight_mat: Any, n_power_iterations: int) -> None:
    """Record the power iteration of a parametrization: u from v, then v from u."""
    with torch.no_grad():
        for _ in range(n_power_iterations):
            _write(module._u, torch.mv(weight_mat, module._v), module.eps)
            _write(module._v, torch.mv(weight_mat.H, module._u), module.eps)


def spectral_norm(hook: Any, module: nn.Module, do_power_iteration: bool) -> Any:
    """Record the weight of the older form, whose iteration begins with v."""
    weight, u, v = (getattr(module, f"{hook.name}_{part}") for part in ("orig", "u", "v"))
    matrix = hook.reshape_weight_to_matrix(weight)
    if do_power_iteration:
        with torch.no_grad():
            for _ in range(hook.n_power_iterations):
                _write(v, torch.mv(matrix.t(), u), hook.eps)
                _write(u, torch.mv(matrix, v), hook.eps)
    # Copies: a second call writes into u and v before the backward of the first.
    return weight / torch.dot(u.clone(), torch.mv(matrix, v.clone()))


def weight_norm(module: Any, weight_g: Any, weight_v: Any) -> Any:
    """Record g v / |v|, the norm over all dimensions but one, or over all where that is -1."""
    rows = weight_v if module.dim == -1 else weight_v.movedim(module.dim, 0)
    norms = rows.reshape((weight_g.numel(), -1)).norm(2, 1).reshape(weight_g.shape)
    return weight_v * (weight_g / norms)


def weight_norm_of_hook(hook: Any, module: nn.Module) -> Any:
    """Record the weight of the older form."""
    g, v = (getattr(module, f"{hook.name}_{part}") for part in ("g", "v"))
    return weight_norm(hook, g, v)


def _write(buffer: Tensor, value: Any, eps: float) -> None:
    buffer.copy_(F.normalize(value, dim=0, eps=eps))
