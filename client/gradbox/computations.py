"""What a user asks a box to compute, and how it becomes a job spec.

A computation is data: making one checks its inputs and nothing else. `prepare` traces its
functions, cuts its tensors into blobs and names both in a spec. Nothing here talks to a box.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from pydantic import ValidationError

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.protocol import (
    BuiltinLoss,
    GradientSpec,
    GraphLoss,
    JobSpec,
    PenaltySpec,
    TracedFunction,
)
from gradbox.protocol.spec import Returned, Scalar, describe_validation
from gradbox.shards import ShardGroup, read_groups
from gradbox.signatures import check_builtin
from gradbox.tensors import Blob, Tensor, is_tensor, is_torch_importable, tensor_bytes
from gradbox.uploads import Uploads

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Prepared:
    """A job ready to be posted: its spec, and the blobs that the spec names."""

    spec: JobSpec
    blobs: tuple[Blob, ...]


class Builtin:
    """A loss that the box carries: `Builtin("info_nce", temperature=0.05)`.

    `gradbox.losses` lists them; they need no torch on this side.
    """

    def __init__(self, name: str, /, **options: Scalar) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Builtin({self.name!r}{options})"


Loss: TypeAlias = "Callable[..., Any] | torch.nn.Module | Builtin"


@dataclass(frozen=True, kw_only=True, eq=False)
class Computation:
    """What every computation is told.

    Args:
        model: NAME, or NAME@VERSION with at least 8 digits of the version.
        inputs: a list of shards, or {group: list of shards}; a shard is {argument: tensor}, a bare
            tensor (the first argument) or a tuple. Torch tensors and NumPy arrays alike.
        output: which part of the model's output is z: a name or an index. Not needed if the model
            returns one tensor.
        readout: a function (output, inputs) → z that runs on the box after `output`: pooling, say.
            It is traced, as the loss is.
        method: the entry point, or {group: entry point}.
        mode: "train" has dropout and batch norm do what they do in training.
        seed: of the random streams; shard i of group k draws from (seed, k, i) alone.
        wrt: globs over parameter names; by default every floating-point parameter.
        weights: a partial state dict laid over the registered weights for this job.
        priority: from -10 to 10; higher goes first.
        timeout_s: how long the job may run.
        precision: "fp32" computes in the weights' own dtype; "tf32", "bf16" and "fp16" in less
            where the model's arithmetic can, "fp64" in float64 throughout. Gradients are summed in
            float32 or wider.
        retain: memory in bytes for graphs kept from the first pass, so that fewer shards are
            replayed; 0 keeps one shard's graph at a time, "auto" takes what is free on the device.
        streams: whether random numbers belong to shards, or to samples ("sample"), so that another
            cut into shards gives the same gradient.
        order: the permutation that puts Z into the order that the loss expects, as `pack` gives it:
            integers of shape (samples,), or {group: integers}.
        name: what listings show.
    """

    model: str
    inputs: Any
    output: str | int | None = None
    readout: Callable[..., Any] | None = None
    method: str | Mapping[str, str] = "forward"
    mode: Literal["eval", "train"] = "eval"
    seed: int = 0
    wrt: str | Sequence[str] | None = None
    weights: Mapping[str, Tensor] | None = None
    priority: int = 0
    timeout_s: float = 3600.0
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    retain: int | Literal["auto"] = "auto"
    streams: Literal["shard", "sample"] = "shard"
    order: Tensor | Mapping[str, Tensor] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _ = self.groups

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """`inputs`, read into groups of named shards."""
        return read_groups(self.inputs, method=self.method, order=self.order)

    def shared_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Return the fields of a spec that all computations have."""
        overlay = {} if self.weights is None else self.weights
        if not isinstance(overlay, Mapping):
            raise InvalidInputs(
                f"weights: expected {{name: tensor}}, got {type(overlay).__name__}; "
                f"write model.state_dict()"
            )
        weights = {
            name: tensor_bytes(value, where=f"weights[{name!r}]") for name, value in overlay.items()
        }
        return {
            "model": self.model,
            "inputs": uploads.groups(self.groups),
            "output": self.output,
            "readout": self._traced_readout(uploads),
            "mode": self.mode,
            "seed": self.seed,
            "wrt": [self.wrt] if isinstance(self.wrt, str) else self.wrt and list(self.wrt),
            "weights": uploads.tensors(weights),
            "priority": self.priority,
            "timeout_s": self.timeout_s,
            "precision": self.precision,
            "retain": self.retain,
            "streams": self.streams,
            "name": self.name,
        }

    def _traced_readout(self, uploads: Uploads) -> TracedFunction | None:
        if self.readout is None:
            return None
        return traced(self.readout, uploads, what="readout", positional=2, structured=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Penalty:
    """A term Σᵢ weight · loss(tapᵢ) added to L, tapᵢ being an intermediate activation of shard i.

    Its graph is gone before the next layer runs, so many penalties take no more memory than one.

    Args:
        at: a submodule by its name, whose output is the tap, or an element of that output:
            "encoder.layer.3", "encoder.layer.3[0]", "encoder[last_hidden_state]".
        loss: tap → scalar, traced as every loss is. Parameters of its own are held constant.
        weight: the factor before it.
        per_sample_scale: a function of the shard's final outputs z that gives one number a sample,
            (b,); sample b's gradient of the penalty is multiplied by it on its way back. It is held
            constant, and the value of L does not contain it.
    """

    at: str
    loss: Callable[..., Any] | torch.nn.Module
    weight: float = 1.0
    per_sample_scale: Callable[..., Any] | None = None

    def spec(self, uploads: Uploads) -> PenaltySpec:
        """Trace the functions and return the penalty as it is posted."""
        what = f"penalty at {self.at!r}"
        scale = None
        if self.per_sample_scale is not None:
            scale = traced(
                self.per_sample_scale, uploads, what=f"{what}: per_sample_scale", positional=1
            )
        loss = traced(self.loss, uploads, what=what, positional=1)
        try:
            return PenaltySpec(at=self.at, loss=loss, weight=self.weight, per_sample_scale=scale)
        except ValidationError as error:
            raise InvalidJob(f"{what}: {describe_validation(error)}") from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient(Computation):
    """dL/dθ of L = loss(Z, **loss_inputs), Z being the outputs of all shards.

    Args:
        loss: a function, an nn.Module or a `Builtin`. With one unnamed group it is called as
            loss(Z, **loss_inputs); with named groups each Z goes by its group's name. It is traced
            to a graph of allowed operations and returns a scalar; the value is exactly that.
        loss_inputs: what else the loss reads: tensors, or plain numbers, strings and booleans.
            Where a tensor requires grad, its gradient comes back as `loss_inputs.NAME`; the
            parameters of a loss module come back as `loss.NAME`.
        penalties: terms on intermediate activations.
        returns: what the result holds, of "grads", "buffers", "outputs" (Z), "cotangents" (∂L/∂Z)
            and "input_grads".

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    loss: Loss
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    penalties: Sequence[Penalty] = ()
    returns: Sequence[Returned] = ("grads",)

    def __repr__(self) -> str:
        shards = " + ".join(f"{len(group.shards)} {group.name}" for group in self.groups)
        return f"Gradient(model={self.model!r}, shards={shards}, loss={self.loss!r})"

    def prepare(self) -> Prepared:
        """Trace the functions, and name every tensor by the blob it lies in.

        Raises:
            UntraceableLoss: the loss or the readout is not made of allowed operations.
            InvalidInputs: a loss input or a weight is not a tensor.
            InvalidJob: a field has a value that no job can have.
        """
        uploads = Uploads()
        tensors, scalars = _split_loss_inputs(self.loss_inputs)
        if isinstance(self.loss, Builtin):
            loss: BuiltinLoss | GraphLoss = self._builtin_loss(self.loss, list(tensors), scalars)
        else:
            loss = GraphLoss(function=self._traced_loss(list(tensors), scalars, uploads))
        refs = uploads.tensors(
            {name: tensor_bytes(t, where=f"loss_inputs[{name!r}]") for name, t in tensors.items()}
        )
        fields = self.shared_fields(uploads) | {
            "loss": loss,
            "loss_inputs": {
                name: ref.model_copy(update={"requires_grad": _requires_grad(tensors[name])})
                for name, ref in refs.items()
            },
            "penalties": [penalty.spec(uploads) for penalty in self.penalties],
            "returns": [self.returns] if isinstance(self.returns, str) else list(self.returns),
        }
        return Prepared(spec=_checked(fields), blobs=uploads.blobs)

    def _builtin_loss(
        self, loss: Builtin, tensors: list[str], scalars: dict[str, Scalar]
    ) -> BuiltinLoss:
        twice = sorted(set(loss.options) & set(scalars))
        if twice:
            raise InvalidJob(f"loss: expected each option once, got {twice} in loss_inputs as well")
        options = {**loss.options, **scalars}
        groups = [group.name for group in self.groups]
        check_builtin(loss.name, options, groups=groups, inputs=tensors)
        return BuiltinLoss(name=loss.name, options=options)

    def _traced_loss(
        self, tensors: list[str], scalars: dict[str, Scalar], uploads: Uploads
    ) -> TracedFunction:
        names = [group.name for group in self.groups]
        unnamed = len(names) == 1
        return traced(
            self.loss,
            uploads,
            what="loss",
            positional=1 if unnamed else 0,
            arguments=tensors if unnamed else names + tensors,
            options=scalars,
        )


def traced(
    function: Any, uploads: Uploads, *, what: str, structured: bool = False, **arguments: Any
) -> TracedFunction:
    """Trace a function and upload the tensors that it reads.

    Args:
        what: what an error calls it.
        structured: its arguments may be dicts or a model's output, as a readout's are.
        arguments: as `gradbox.graphs.trace.trace` takes them.
    """
    if not callable(function):
        raise InvalidJob(
            f"{what}: expected a function, an nn.Module or a Builtin, got {function!r}; "
            f"a loss that the box carries is written Builtin('info_nce')"
        )
    if not is_torch_importable():
        raise InvalidJob(
            f"{what}: a function can only be traced where torch is installed: "
            f"pip install 'gradbox[torch]', or use a Builtin"
        )
    from gradbox.graphs.trace import trace

    found = trace(function, structured=structured, **arguments)
    tensors = {**found.constants, **found.parameters}
    refs = uploads.tensors(
        {name: tensor_bytes(t, where=f"{what}: tensor {name!r}") for name, t in tensors.items()}
    )
    return TracedFunction(
        graph=found.graph,
        tensors={
            name: ref.model_copy(update={"requires_grad": name in found.parameters})
            for name, ref in refs.items()
        },
    )


def _checked(fields: dict[str, Any]) -> JobSpec:
    try:
        return GradientSpec(**fields)
    except ValidationError as error:
        raise InvalidJob(describe_validation(error)) from None


def _split_loss_inputs(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Part tensors, which are uploaded, from plain values, which become part of the loss."""
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, np.generic):
            scalars[name] = value.item()
        elif value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        elif is_tensor(value):
            tensors[name] = value
        else:
            raise InvalidInputs(
                f"loss_inputs[{name!r}]: expected a tensor, a NumPy array, a number, a string or "
                f"None, got {type(value).__name__}; convert it with torch.as_tensor"
            )
    return tensors, scalars


def _requires_grad(tensor: Any) -> bool:
    return bool(getattr(tensor, "requires_grad", False))
