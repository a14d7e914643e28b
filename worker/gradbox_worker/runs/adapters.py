"""Adapters by peft: the modules that a run with an adapter has of its own, on a shared base.

The structure of the registered model is copied, its tensors are not: every parameter and buffer of
the copy is the base's own. peft puts the adapter's layers into the copy, with tensors of their own.
So the base is never changed, each run has its rank and targets, and it makes no difference to one
who else trains. A job puts the shared tensors back as it does on the base.

The first numbers of A are drawn from `step_seed(run.seed, 0)`:

    with torch.random.fork_rng():
        torch.manual_seed(step_seed(run.seed, 0))
        inject_adapter_in_model(LoraConfig(r=…, lora_alpha=…, target_modules=…), model)

A model whose code keeps another way to its own modules, such as a closure over one, would call
those of the base through it. The adapter has no gradient there, which the receipt says as for any
parameter that the loss does not reach.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import nn

from gradbox.errors import InvalidInputs
from gradbox.protocol import LoRASpec, step_seed

ADAPTER: Final = "default"
"""What peft calls it, if nobody says otherwise."""

PART_OF_NAME: Final = "lora_"
KINDS: Final = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV1D: Final = "Conv1D"  # of transformers: a linear layer with its weight transposed


def adapted(base: nn.Module, lora: LoRASpec, *, seed: int) -> nn.Module:
    """Return a model with an adapter, whose other tensors are those of the base.

    Args:
        seed: of the run.

    Raises:
        InvalidInputs: this worker has no peft, a target is not there or peft does not adapt it, or
            the model's structure cannot be copied.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InvalidInputs(
            "adapter: expected a worker with peft installed, got one without; have the box's owner "
            "run `pip install peft` where its workers are, or train without an adapter"
        ) from None
    shared = {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
    try:
        model = copy.deepcopy(base, dict(shared))
    except (TypeError, RuntimeError, copy.Error) as error:  # as attributes of modules raise them
        raise InvalidInputs(
            f"adapter: expected a model whose structure can be copied, got {type(error).__name__}: "
            f"{error}; train without an adapter"
        ) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),  # said to be an int, and divided by r
        lora_dropout=lora.dropout,
        # A list would match ends of names as well.
        target_modules="|".join(map(re.escape, targets_of(model, lora))),
    )
    with torch.random.fork_rng(devices=[]), _flags_kept(base):
        torch.default_generator.manual_seed(step_seed(seed, 0))
        try:
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise InvalidInputs(f"adapter: peft refuses it: {error}") from error
    return model


def adapter_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that an adapter brought."""
    return [
        name
        for name, _ in model.named_parameters()
        if any(part.startswith(PART_OF_NAME) for part in name.split("."))
    ]


def peft_names(model: nn.Module) -> dict[str, str]:
    """Return peft's names of an adapter's parameters in a state dict, by their names here."""
    return {
        name: "base_model.model." + name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")
        for name in adapter_parameters(model)
    }


def targets_of(model: nn.Module, lora: LoRASpec) -> list[str]:
    """Return the names of the layers that an adapter is put beside.

    Raises:
        InvalidInputs: a pattern names none.
    """
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, KINDS) or type(module).__name__ == CONV1D
    ]
    for pattern in lora.targets:
        if not any(fnmatchcase(name, pattern) for name in layers):
            close = get_close_matches(pattern, layers, n=3, cutoff=0.4) or layers[:3]
            raise InvalidInputs(
                f"adapter: expected targets among the {len(layers)} linear, embedding and "
                f"convolution layers of the model, got {pattern!r}, which is none of them; did you "
                f"mean {', '.join(map(repr, close)) or 'another model'}?"
            )
    return [name for name in layers if any(fnmatchcase(name, p) for p in lora.targets)]


@contextmanager
def _flags_kept(base: nn.Module) -> Iterator[None]:
    """Put back `requires_grad` of the shared parameters, which peft switches off."""
    flags = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
