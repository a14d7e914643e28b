"""A model made ready for one job: flags, numbers, arithmetic, and the ways to call it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from gradbox_engine.model.calling.calls import ModelCalls
from gradbox_engine.model.calling.shard_feed import ShardFeed
from gradbox_engine.model.calling.shard_rng import generators_restored
from gradbox_engine.model.kernels import checkpoints_reached, repeatable_kernels
from gradbox_engine.model.precision import arithmetic, passes_float16
from gradbox_engine.model.state.buffers import Buffers
from gradbox_engine.model.state.model_state import ModelState
from gradbox_engine.model.state.restore import RegisteredState, restored
from gradbox_engine.model.state.written_parameters import Changes, unwritten_parameters
from gradbox_engine.model.tensor_equality import storages_of
from gradbox_engine.model.weights import lay_over, widen
from gradbox_engine.model.wrt import Selection, matched_inputs
from gradbox_engine.requests import CallOptions, Group


@dataclass(frozen=True)
class Prepared:
    """A model made ready for one job, and the ways to put shards through it."""

    calls: ModelCalls
    feed: ShardFeed
    buffers: Buffers
    options: CallOptions
    inputs: Mapping[str, Sequence[str]]  # by group, the arguments whose gradients are wanted
    devices: tuple[torch.device, ...]  # on which the model lies; inputs and Z on the first one
    model: nn.Module
    parameters: Sequence[Tensor]  # of the model, each once
    changes: Changes  # that the model's forward passes have made and nothing puts back

    @property
    def device(self) -> torch.device:
        """Where shards go to, and Z is."""
        return self.devices[0]

    @cached_property
    def parameter_storages(self) -> frozenset[int]:
        """The addresses of the parameters' storages; few jobs ask."""
        return frozenset(storages_of(self.parameters))

    @property
    def in_float16(self) -> bool:
        """Whether gradients pass through float16."""
        return passes_float16(self.parameters, self.options.precision)


@contextmanager
def configured(
    model: nn.Module, parameters: Mapping[str, Tensor], options: CallOptions
) -> Iterator[tuple[RegisteredState, Changes]]:
    """Set the model's mode, numbers and `requires_grad`, and put all of it back on the way out.

    Gives what the model has, and what its forward passes change for good.

    Args:
        parameters: those that are differentiated; no other requires grad.

    Raises:
        ModelCallFailed: the model has registered a parameter in between, which has no gradient, or
            a hook on one, which would run once more for each pass, or has written to one.
    """
    differentiated = {id(parameter) for parameter in parameters.values()}
    with (
        torch.inference_mode(False),
        unwritten_parameters(
            model,
            options.mode,
            overlaid=_overlaid(model, options),
            differentiated=bool(parameters),
        ) as changes,
        restored(model) as registered,
        generators_restored(),
        arithmetic(options.precision),
        checkpoints_reached(),
    ):
        if options.widened:
            widen(model)
        lay_over(model, options.weights, widened=options.widened)
        training = options.mode == "train"
        if any(module.training != training for module in registered.modules):
            model.train(training)
            registered = registered._replace(state=ModelState(model))
        for parameter in registered.parameters:
            parameter.requires_grad_(id(parameter) in differentiated)
            parameter.grad = None
        with repeatable_kernels(registered.modules):
            yield registered, changes
        changes.refuse_new()


def _overlaid(model: nn.Module, options: CallOptions) -> set[int]:
    """Return the ids of the parameters in which the job has numbers of its own."""
    given = options.weights or {}
    if not given and not options.widened:
        return set()
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter) for name, parameter in named if options.widened or name in given}


@contextmanager
def prepared(
    model: nn.Module, groups: Sequence[Group], selection: Selection, options: CallOptions
) -> Iterator[Prepared]:
    """Make a model ready for shards, and put it back on the way out, whatever happened inside."""
    inputs = matched_inputs(groups, selection.input_patterns)
    with configured(model, selection.parameters, options) as (registered, changes):
        devices = devices_of((*registered.parameters, *registered.buffers))
        yield Prepared(
            calls=ModelCalls(model, groups, options, device=devices[0], differentiated=inputs),
            feed=ShardFeed(groups, devices[0], widened=options.widened),
            buffers=Buffers(model, registered.state),
            options=options,
            inputs=inputs,
            devices=devices,
            model=model,
            parameters=registered.parameters,
            changes=changes,
        )


def model_devices(model: nn.Module) -> tuple[torch.device, ...]:
    """Return where a model's parameters and buffers lie, the first one's first; or the CPU.

    A model that lies on several devices moves what its modules hand on by itself.
    """
    return devices_of(chain(model.parameters(), model.buffers()))


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """Return where tensors lie, the first one's first; the CPU where there are none."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors)) or (torch.device("cpu"),)
