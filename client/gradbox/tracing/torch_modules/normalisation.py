"""Batch norm and instance norm.

`nn.BatchNorm1d` asks for a rank only to check it. With `momentum=None` it divides by a count that
is a symbol, so its running statistics are recorded as the formula that they are. `nn.SyncBatchNorm`
is recorded as batch norm over Z, which is whole on the box. `nn.InstanceNorm1d` is recorded as it
is for a batch, and asserts that there is one.
"""

from __future__ import annotations

from typing import Any, Final

import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gradbox.tracing.torch_modules.assertions import of_rank, record_assertion

_OWN_BATCH_NORM: Final = _BatchNorm.forward


def batch_norm(module: Any, input: Any) -> Any:
    """Record a batch norm of any number of dimensions."""
    averages = module.training and module.track_running_stats and module.momentum is None
    if not averages:
        return _OWN_BATCH_NORM(module, input)
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    channels = input.detach().movedim(1, 0).flatten(1)
    for running, of_batch in (
        (module.running_mean, channels.mean(1)),
        (module.running_var, channels.var(1)),
    ):
        running.add_((of_batch - running) / module.num_batches_tracked)
    return F.batch_norm(input, None, None, module.weight, module.bias, True, 0.0, module.eps)


def instance_norm(module: Any, input: Any) -> Any:
    """Record an instance norm of a batch."""
    of_rank(module._get_no_batch_dim() + 1)(module, input)
    if module.affine:
        message = f"{type(module).__name__}: expected {module.num_features} channels"
        record_assertion(input.size(1) == module.num_features, message)
    return module._apply_instance_norm(input)
