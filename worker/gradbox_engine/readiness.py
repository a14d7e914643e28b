"""A registered model made ready for one job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradbox_engine.job import Mode, Precision, model_device
from gradbox_engine.overlay import lay_over, widen
from gradbox_engine.precision import arithmetic
from gradbox_engine.preservation import preserved


@contextmanager
def made_ready(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    *,
    mode: Mode,
    precision: Precision,
    weights: Mapping[str, Tensor],
) -> Iterator[torch.device]:
    """Set flags, numbers and arithmetic for one job, and put all of it back after it.

    Args:
        parameters: those that gradients are wanted for; all others are constants.

    Yields:
        the model's device.
    """
    with preserved(model), arithmetic(precision):
        lay_over(model, weights)
        if precision == "fp64":
            widen(model)
        model.train(mode == "train")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in parameters:
            parameter.requires_grad_()
        yield model_device(model)
