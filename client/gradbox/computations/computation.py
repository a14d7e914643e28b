"""What all computations have in common, and how one becomes a spec with its blobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from gradbox.computations.functions import traced
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.shards import ShardGroup, read_groups
from gradbox.inputs.uploads import KnownTensors, SentTensor, Uploads
from gradbox.protocol import (
    CotangentGradientSpec,
    CotangentStepSpec,
    GradientOptions,
    JobOptions,
    JobSpec,
    StateRef,
    TracedFunction,
    options_of,
)
from gradbox.protocol.spec import describe_validation
from gradbox.tensors.blob import Blob
from gradbox.tensors.tensor_bytes import Tensor

Spec = TypeVar("Spec", bound=BaseModel)
Posted: TypeAlias = JobSpec | CotangentGradientSpec | CotangentStepSpec
JOBS: Final = "/v1/jobs"


class OfARun(Protocol):
    """A run, or a state of one: its numbers are on the box already."""

    @property
    def state_ref(self) -> StateRef:
        """Which state that is, as a spec names it."""


Weights: TypeAlias = "Mapping[str, Tensor] | OfARun | str"


@dataclass(frozen=True, eq=False)
class Submission:
    """A job ready to be posted.

    Attributes:
        blobs: those that the spec names, but for what the client knows to be on the box.
        large: the large tensors that it names.
        path: where it is posted.
    """

    spec: Posted
    blobs: tuple[Blob, ...]
    large: tuple[SentTensor, ...]
    path: str = JOBS

    @classmethod
    def of(cls, spec: Posted, uploads: Uploads, *, path: str = JOBS) -> Submission:
        """Return the submission of a spec and what was collected for it."""
        return cls(spec, uploads.blobs, tuple(uploads.large), path)

    def estimating(self) -> Submission:
        """Return the submission of a job that says what this one would take, and does no more.

        Raises:
            InvalidJob: this one is at cotangents, and what it takes was decided before.
        """
        if "estimate" not in type(self.spec).model_fields:
            raise InvalidJob(
                "estimate: expected a computation with its loss, got one at Cotangents, whose "
                "forward job has run by now: estimate the Gradient with a loss of its outputs"
            )
        return replace(self, spec=self.spec.model_copy(update={"estimate": True}))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """Which model a computation calls, and with what.

    Args:
        model: NAME, or NAME@VERSION with at least 8 digits of the version.
        inputs: a list of shards, or {group: list of shards}; a shard is {argument: tensor}, a bare
            tensor (the first argument) or a tuple. Torch tensors and NumPy arrays alike.
        readout: a function (output, inputs) → z that runs on the box after `output`: pooling, say.
            It is traced, as the loss is.
        method: the entry point, or {group: entry point}.
        weights: a partial state dict, name → tensor of the registered one's shape, laid over the
            registered weights for this job alone; or a run, one of its states (`run.at(100)`), or
            the name of a saved one: then nothing is sent.
        order: the permutation that puts Z into the order that the loss expects, as `pack` gives it:
            integers of shape (samples,), or {group: integers}.
    """

    model: str
    inputs: Any
    readout: Callable[..., Any] | None = None
    method: str | Mapping[str, str] = "forward"
    weights: Weights | None = None
    order: Tensor | Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        _ = self.groups

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """`inputs`, read into groups of named shards."""
        return read_groups(self.inputs, method=self.method, order=self.order)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Computation(JobOptions, ModelCall, ABC):
    """The arguments that all computations share are those of `ModelCall` and of `JobOptions`."""

    def __repr__(self) -> str:
        shards = " + ".join(f"{len(group.shards)} {group.name}" for group in self.groups)
        return f"{type(self).__name__}(model={self.model!r}, shards={shards})"

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
        state = state_ref(self.weights)
        overlay = {} if self.weights is None or state is not None else self.weights
        if not isinstance(overlay, Mapping):
            raise InvalidInputs(
                f"weights: expected {{name: tensor}} or a run, got {type(overlay).__name__}; "
                f"write model.state_dict()"
            )
        return options_of(self, JobOptions) | {
            "model": self.model,
            "inputs": uploads.groups(self.groups),
            "readout": self._traced_readout(uploads),
            "weights": uploads.named(overlay, where="weights"),
            "state": state,
        }

    def _traced_readout(self, uploads: Uploads) -> TracedFunction | None:
        if self.readout is None:
            return None
        return traced(self.readout, uploads, what="readout", positional=2, structured=True)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Differentiated(Computation, GradientOptions):
    """The arguments of computations that give gradients of the model's own parameters.

    Args:
        wrt: globs over the names of parameters, and of modules, which stand for all parameters
            below them; by default every floating-point parameter.
    """

    wrt: str | Sequence[str] | None = None

    def shared_fields(self, uploads: Uploads) -> dict[str, Any]:
        options = options_of(self, GradientOptions)
        return super().shared_fields(uploads) | options | {"wrt": globs(self.wrt)}


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


def state_ref(given: Any, *, where: str = "weights") -> StateRef | None:
    """Return the state that a run, one of its states or the name of a saved one stands for.

    Args:
        where: what an error begins with.

    Returns:
        None where it is something else.

    Raises:
        InvalidJob: it is no name that a state can have.
    """
    if isinstance(given, str):
        return checked(StateRef, where=where, save=given)
    found = getattr(given, "state_ref", None)
    return found if isinstance(found, StateRef) else None


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
