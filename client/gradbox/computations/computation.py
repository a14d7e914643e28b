"""What all computations have in common, and how one becomes a spec with its blobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from gradbox.computations.traced_function import traced
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.known_tensors import KnownTensors, SentTensor
from gradbox.inputs.shards import ShardGroup, read_groups
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import CotangentGradientSpec, JobSpec, TracedFunction
from gradbox.protocol.spec import describe_validation
from gradbox.protocol.spec_fields import Transfer
from gradbox.tensors.blob import Blob
from gradbox.tensors.tensor_bytes import Tensor

Spec = TypeVar("Spec", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class Submission:
    """A job ready to be posted.

    Attributes:
        blobs: those that the spec names, but for what the client knows to be on the box.
        large: the large tensors that it names.
    """

    spec: JobSpec | CotangentGradientSpec
    blobs: tuple[Blob, ...]
    large: tuple[SentTensor, ...]

    @classmethod
    def of(cls, spec: JobSpec | CotangentGradientSpec, uploads: Uploads) -> Submission:
        """Return the submission of a spec and what was collected for it."""
        return cls(spec, uploads.blobs, tuple(uploads.large))


@dataclass(frozen=True, kw_only=True, eq=False)
class Computation(ABC):
    """The arguments that all computations share.

    Args:
        model: NAME, or NAME@VERSION with at least 8 digits of the version.
        inputs: a list of shards, or {group: list of shards}; a shard is {argument: tensor}, a bare
            tensor (the first argument) or a tuple. Torch tensors and NumPy arrays alike.
        output: which part of the model's output is z: a name or an index. Not needed if the model
            returns one tensor.
        readout: a function (output, inputs) → z that runs on the box after `output`: pooling, say.
            It is traced, as the loss is.
        method: the entry point, or {group: entry point}.
        mode: "train" calls the model as `model.train()` does, with dropout and batch statistics.
        seed: of the random streams; shard i of group k draws from (seed, k, i) alone.
        weights: a partial state dict, name → tensor of the registered one's shape, laid over the
            registered weights for this job alone.
        priority: from -10 to 10; higher goes first. Above 0 needs the token of the box's owner.
        timeout_s: seconds that the job may run, up to a week.
        devices: how many devices of the box's cluster the job may run on at once: at most so many,
            of those that are idle when it starts, or "auto" for all of them. It never waits for
            more than one.
        precision: "fp32" computes in the weights' own dtype; "tf32", "bf16" and "fp16" in less
            where the model's arithmetic can, "fp64" in float64 throughout. Gradients are summed in
            float32 or wider.
        streams: whether random numbers belong to shards, or to samples ("sample"), so that another
            cut into shards gives the same gradient.
        transfer: the format of gradients in the result file: "bf16" and "fp16" halve the bytes. The
            result gives them back in the dtype that they had; its receipt states the rounding.
            Tensors of `weights` may then come in this format, too, and are widened on the box.
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
    weights: Mapping[str, Tensor] | None = None
    priority: int = 0
    timeout_s: float = 3600.0
    devices: int | Literal["auto"] = 1
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    streams: Literal["shard", "sample"] = "shard"
    transfer: Transfer = "exact"
    order: Tensor | Mapping[str, Tensor] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _ = self.groups

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """`inputs`, read into groups of named shards."""
        return read_groups(self.inputs, method=self.method, order=self.order)

    @abstractmethod
    def prepare(self, known: KnownTensors | None = None) -> Submission:
        """Trace the functions, and name every tensor by the blob that holds it.

        Args:
            known: what the client has sent before.

        Raises:
            UntraceableLoss: a function is not made of allowed operations.
            InvalidInputs: something that should be a tensor is none.
            InvalidJob: a field has a value that no job can have.
        """

    def shared_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Return the fields of a spec that all computations have."""
        if not isinstance(self.model, str):
            raise InvalidJob(
                f"model: expected the name of a model on the box, as `gradbox models list` shows "
                f"it, got {type(self.model).__name__}; the numbers of a copy go along as "
                f"weights=model.state_dict()"
            )
        overlay = {} if self.weights is None else self.weights
        if not isinstance(overlay, Mapping):
            raise InvalidInputs(
                f"weights: expected {{name: tensor}}, got {type(overlay).__name__}; "
                f"write model.state_dict()"
            )
        return {
            "model": self.model,
            "inputs": uploads.groups(self.groups),
            "output": self.output,
            "readout": self._traced_readout(uploads),
            "mode": self.mode,
            "seed": self.seed,
            "weights": uploads.named(overlay, where="weights"),
            "transfer": self.transfer,
            "priority": self.priority,
            "timeout_s": self.timeout_s,
            "devices": self.devices,
            "precision": self.precision,
            "streams": self.streams,
            "name": self.name,
        }

    def _traced_readout(self, uploads: Uploads) -> TracedFunction | None:
        if self.readout is None:
            return None
        return traced(self.readout, uploads, what="readout", positional=2, structured=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Differentiated(Computation):
    """The arguments of computations that give gradients of the model's own parameters.

    Args:
        wrt: globs over the names of parameters, and of modules, which stand for all parameters
            below them; by default every floating-point parameter.
        retain: memory in bytes for graphs kept from the first pass, so that fewer shards are
            replayed; 0 keeps one shard's graph at a time, "auto" takes what is free on the device.
    """

    wrt: str | Sequence[str] | None = None
    retain: int | Literal["auto"] = "auto"

    def shared_fields(self, uploads: Uploads) -> dict[str, Any]:
        return super().shared_fields(uploads) | {
            "wrt": globs(self.wrt),
            "retain": self.retain,
        }


def prepared(computation: Computation, known: KnownTensors | None = None) -> Submission:
    """Return the submission of what a client was handed.

    Args:
        known: what the client has sent before.

    Raises:
        InvalidJob: it is no computation, or one that cannot be run as it is.
    """
    given: object = computation
    if not isinstance(given, Computation):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise InvalidJob(
            f"expected one computation, such as Gradient(model=..., inputs=..., loss=...), got "
            f"{got}"
        )
    return given.prepare(known)


def globs(wrt: str | Sequence[str] | None) -> list[str] | None:
    """Return what `wrt` names, as a list; None for all parameters.

    Raises:
        InvalidInputs: something in it is no name.
    """
    given = [] if wrt is None else listed(wrt)
    wrong = [type(name).__name__ for name in given if not isinstance(name, str)]
    if wrong:
        raise InvalidInputs(
            f"wrt: expected names of parameters, or globs over them, got a {wrong[0]}; write "
            f"[name for name, _ in model.named_parameters()], or 'encoder.*'"
        )
    return None if wrt is None else given


def listed(names: str | Sequence[str]) -> list[str]:
    """Return one name, or several, as a list."""
    several = isinstance(names, Iterable) and not isinstance(names, str | bytes)
    return list(names) if several else [names]  # type: ignore[list-item]  # the spec refuses it


def checked(spec: type[Spec], *, where: str = "", **fields: Any) -> Spec:
    """Return the spec of these fields.

    Args:
        where: what an error begins with.

    Raises:
        InvalidJob: a field has a value that no job can have.
    """
    try:
        return spec(**fields)
    except ValidationError as error:
        raise InvalidJob((where and f"{where}: ") + describe_validation(error)) from None
