"""What the engine takes, made from what a spec names: input groups, the loss, traced functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.graphs.check import arguments_of
from gradbox.losses import BUILTIN
from gradbox.protocol import (
    BuiltinLoss,
    CotangentsLoss,
    GraphLoss,
    MixedGradientSpec,
    SetLossSpec,
    ShardRef,
    SharedSpec,
    TensorRef,
    TracedFunction,
)
from gradbox_engine import Group, Objective, Penalty
from gradbox_engine.model.weights import wide_dtype
from gradbox_worker.interpreting.build import build


@dataclass(frozen=True)
class BuiltFunction:
    """A traced function that can be called, and the leaves of it that want gradients, by name.

    `buffers()` gives what the last call left in those that the graph reads.
    """

    function: Callable[..., Any]
    leaves: Mapping[str, Tensor]
    buffers: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Loss:
    """The loss of a `Gradient` as the engine takes it, and what becomes of its buffers."""

    objective: Objective
    buffers: Callable[[], Mapping[str, Tensor]] = dict


class TensorSource(Protocol):
    """Where the tensors that a spec names are: `BlobTensors`, or what was sent to this process."""

    def tensor(self, ref: TensorRef) -> Tensor: ...
    def shards(self, refs: Sequence[ShardRef]) -> Sequence[Mapping[str, Tensor]]: ...


def input_groups(spec: SharedSpec, methods: Collection[str], tensors: TensorSource) -> list[Group]:
    """Return the groups, whose shards are read when the engine comes to them.

    Args:
        methods: the entry points that jobs may call.

    Raises:
        InvalidInputs: the registry does not allow a group's method.
    """
    for group in spec.inputs:
        if group.method not in methods:
            raise InvalidInputs(
                f"inputs.{group.name}: expected one of the model's entry points "
                f"({', '.join(methods)}), got {group.method!r}; use one of them, or have "
                f"the box's owner add it to the model's methods"
            )
    return [
        Group(
            name=group.name,
            shards=tensors.shards(group.shards),
            method=group.method,
            order=None if group.order is None else tensors.tensor(group.order),
            streams=[shard.stream or (index, place) for place, shard in enumerate(group.shards)],
        )
        for index, group in enumerate(spec.inputs)
    ]


def model_penalties(
    spec: SetLossSpec, tensors: TensorSource, *, device: torch.device
) -> list[Penalty]:
    """Return the penalties with their functions built.

    Raises:
        GraphRefused: a graph is not allowed.
    """

    def built(traced: TracedFunction) -> Callable[..., Any]:
        return build_function(traced, tensors, device=device, widened=spec.widened).function

    return [
        Penalty(
            at=penalty.at,
            loss=built(penalty.loss),
            weight=penalty.weight,
            per_sample_scale=(
                None if penalty.per_sample_scale is None else built(penalty.per_sample_scale)
            ),
        )
        for penalty in spec.penalties
    ]


def gradient_loss(
    spec: SetLossSpec,
    tensors: TensorSource,
    *,
    device: torch.device,
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> Loss:
    """Return the loss with its inputs, and the leaves of both that want gradients.

    Args:
        own: tensors that take the place of those that the spec names, as "loss.NAME" and
            "loss_inputs.NAME"; of the same shapes.

    Raises:
        GraphRefused: the loss's graph is not allowed.
        InvalidInputs: there is no builtin loss of that name, or a leaf is not floating-point.
    """
    refs = {name: value for name, value in spec.loss_inputs.items() if isinstance(value, TensorRef)}
    read = _read(refs, tensors, _under("loss_inputs.", own))
    parameters = {
        f"loss_inputs.{name}": read[name] for name, ref in refs.items() if ref.requires_grad
    }
    inputs = {**spec.loss_inputs, **read}
    if isinstance(spec.loss, BuiltinLoss):
        if spec.loss.name not in BUILTIN:
            raise InvalidInputs(
                f"expected a builtin loss ({', '.join(BUILTIN)}), got {spec.loss.name!r}"
            )
        function = partial(BUILTIN[spec.loss.name], **spec.loss.options)
        return Loss(Objective(function=function, inputs=inputs, parameters=parameters))
    if isinstance(spec.loss, CotangentsLoss):
        raise InvalidInputs("expected a loss to evaluate, got cotangents")
    built = build_function(
        spec.loss.function,
        tensors,
        device=device,
        widened=spec.widened,
        own=_under("loss.", own),
    )
    parameters |= {f"loss.{name}": leaf for name, leaf in built.leaves.items()}
    objective = Objective(function=built.function, inputs=inputs, parameters=parameters)
    return Loss(objective, buffers=built.buffers)


def loss_parameters(spec: SetLossSpec) -> tuple[str, ...]:
    """Return the names of the leaves that `gradient_loss` finds, without reading them."""
    given = [
        f"loss_inputs.{name}"
        for name, value in spec.loss_inputs.items()
        if isinstance(value, TensorRef) and value.requires_grad
    ]
    function = spec.loss.function if isinstance(spec.loss, GraphLoss) else None
    own = function.tensors.items() if function else ()
    return (*given, *(f"loss.{name}" for name, ref in own if ref.requires_grad))


def mixed_objectives(
    spec: MixedGradientSpec, tensors: TensorSource, *, device: torch.device
) -> tuple[Objective, Objective]:
    """Return `inner` and `outer`, which share the members of y that both read.

    Raises:
        GraphRefused: a graph is not allowed.
        InvalidInputs: a leaf is not floating-point.
    """
    y, x = _read(spec.y, tensors), _read(spec.x, tensors)
    leaves = {f"y.{name}": y[name] for name, ref in spec.y.items() if ref.requires_grad}
    outer = build_function(spec.outer, tensors, device=device, widened=spec.widened)
    read = set(arguments_of(spec.outer.graph)[1:])
    return (
        _inner(spec, y, tensors, device=device),
        Objective(
            function=outer.function,
            inputs=x | {name: value for name, value in y.items() if name in read},
            parameters={n: leaf for n, leaf in leaves.items() if n.removeprefix("y.") in read}
            | {f"outer.{name}": leaf for name, leaf in outer.leaves.items()},
        ),
    )


def mixed_inner(
    spec: MixedGradientSpec, tensors: TensorSource, *, device: torch.device
) -> tuple[Objective, dict[str, Tensor]]:
    """Return `inner`, and the leaves of both, where `outer` is evaluated elsewhere.

    Raises:
        GraphRefused: a graph is not allowed.
        InvalidInputs: a leaf is not floating-point.
    """
    inner = _inner(spec, _read(spec.y, tensors), tensors, device=device)
    trained = {name: ref for name, ref in spec.outer.tensors.items() if ref.requires_grad}
    of_outer = {f"outer.{name}": leaf for name, leaf in _read(trained, tensors).items()}
    return inner, {**inner.parameters, **of_outer}


def _inner(
    spec: MixedGradientSpec,
    y: Mapping[str, Tensor],
    tensors: TensorSource,
    *,
    device: torch.device,
) -> Objective:
    built = build_function(spec.inner, tensors, device=device, widened=spec.widened)
    (v_name,) = (name for name in arguments_of(spec.inner.graph) if name not in y)
    leaves = {f"y.{name}": y[name] for name, ref in spec.y.items() if ref.requires_grad}
    return Objective(
        function=lambda v, **inputs: built.function(**{v_name: v}, **inputs),
        inputs=y,
        parameters=leaves | {f"inner.{name}": leaf for name, leaf in built.leaves.items()},
    )


@dataclass(frozen=True)
class _Function:
    """A function, equal to any that was built from the same graph and tensors.

    The engine keeps plans of per-sample jobs by their readout, so that a later job finds them.
    """

    built_from: tuple[str, bool]  # the graph with its tensors, and whether these were widened
    call: Callable[..., Any] = field(compare=False)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def build_function(
    traced: TracedFunction,
    tensors: TensorSource,
    *,
    device: torch.device,
    widened: bool,
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> BuiltFunction:
    """Build a traced function with the tensors it reads.

    Args:
        widened: whether floating-point ones become float64, but those that are trained: the engine
            does that, which gives their gradients in the dtype that they had.
        own: tensors that take the place of those of these names.

    Raises:
        GraphRefused: its graph is not allowed.
    """
    read = _read(traced.tensors, tensors, own)
    leaves = {name: read[name] for name, ref in traced.tensors.items() if ref.requires_grad}
    if widened:
        constants = {name: tensor for name, tensor in read.items() if name not in leaves}
        read |= {name: tensor.to(wide_dtype(tensor.dtype)) for name, tensor in constants.items()}
    buffers = [name for name, ref in traced.tensors.items() if ref.buffer]
    graph_function = build(traced.graph, read, device=device, buffers=buffers)
    return BuiltFunction(
        function=_Function((traced.model_dump_json(), widened), graph_function),
        leaves=leaves,
        buffers=lambda: graph_function.buffers,
    )


def built_readout(
    spec: SharedSpec, tensors: TensorSource, *, device: torch.device
) -> Callable[..., Any] | None:
    """Return a job's readout, if it has one.

    Raises:
        GraphRefused: its graph is not allowed.
    """
    if spec.readout is None:
        return None
    return build_function(spec.readout, tensors, device=device, widened=spec.widened).function


def _under(prefix: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in own.items() if n.startswith(prefix)}


def _read(
    refs: Mapping[str, TensorRef],
    tensors: TensorSource,
    own: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    read = {name: tensors.tensor(ref) for name, ref in refs.items()}
    for name in read.keys() & own.keys():
        if read[name].shape != own[name].shape:
            raise InvalidInputs(
                f"{name}: expected the shape {tuple(own[name].shape)} that the run has trained "
                f"since an earlier step, got {tuple(read[name].shape)}; give it another name, or "
                f"begin another run"
            )
        read[name] = own[name]
    for name, ref in refs.items():
        if ref.requires_grad and not read[name].is_floating_point():
            raise InvalidInputs(
                f"{name}: expected a floating-point tensor, since its gradient is asked for, got "
                f"{read[name].dtype}; convert it, or do not let it require grad"
            )
        read[name].requires_grad_(ref.requires_grad)
    return read
