"""A job as it is posted to /v1/jobs: one model a computation, told apart by `computation`.

Two specs that mean the same job have the same canonical JSON and so the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from gradbox.errors import InvalidJob
from gradbox.graphs.wire_form import NUMBER, Entries, Items
from gradbox.protocol.options import Retain, RunOptions
from gradbox.protocol.per_sample import JacobianSpec, PerSampleGradientSpec, SampleSpec
from gradbox.protocol.spec_fields import (
    PROTOCOL,
    BuiltinLoss,
    ConstantRef,
    CotangentsLoss,
    DifferentiatedSpec,
    GraphLoss,
    Identifier,
    InputGroup,
    JobId,
    LossSpec,
    PenaltySpec,
    SaveName,
    Scalar,
    ShardRef,
    SharedSpec,
    StateRef,
    TensorName,
    TensorRef,
    TracedFunction,
    Wire,
)
from gradbox.protocol.stores import StoreFitSpec, StoreQuerySpec, StoreRowsSpec

Returned = Literal["grads", "input_grads", "outputs", "cotangents", "buffers"]
Rate = Annotated[float, Field(ge=0), NUMBER]
Positive = Annotated[float, Field(gt=0), NUMBER]
CotangentReturned = Literal["grads", "input_grads"]
MixedReturned = Literal["grads", "dfdz"]
CurvatureKind = Literal["hessian", "ggn"]
ForwardReturned = Literal["outputs", "buffers"]


class SetLossSpec(DifferentiatedSpec, frozen=True):
    """The fields of computations that differentiate a loss over all shards."""

    loss: LossSpec
    loss_inputs: Entries[Identifier, TensorRef | Scalar] = {}
    penalties: Annotated[Items[PenaltySpec], Field(max_length=1000)] = []


class GradientSpec(SetLossSpec, frozen=True):
    """dL/dθ of a loss over all shards."""

    computation: Literal["gradient"]
    returns: Annotated[Items[Returned], Field(min_length=1)] = ["grads"]


class Update(Wire, frozen=True):
    """What a step of a run has beside a gradient: which it is, and how its optimizer updates.

    `lr` is the rate from this step on: one, or one for each group of the optimizer and one for the
    rest. Gradients are cut to ± `clip_value`, then scaled to a norm of at most `clip_norm`.
    """

    computation: Literal["step"]
    run: JobId
    number: Annotated[int, Field(ge=1, lt=2**53), NUMBER]
    lr: Rate | Annotated[Items[Rate], Field(min_length=1, max_length=101)] | None = None
    clip_norm: Positive | None = None
    clip_value: Positive | None = None


class StepSpec(SetLossSpec, Update, frozen=True):
    """A step of a run: dL/dθ at the run's weights, by which its optimizer then updates them.

    Model, wrt, mode and precision are the run's, and the seed is `step_seed` of the run's and
    `number`; whoever posts a step may leave them out.
    """

    returns: Items[Returned] = []


class StateSpec(SharedSpec, frozen=True):
    """The state of a run, written: its weights as a result, or all of it under the name `save`.

    Nobody posts one: the box makes it of a request for weights or a save. `state` names a run and
    a step.
    """

    computation: Literal["state"]
    inputs: Annotated[Items[InputGroup], Field(max_length=0)] = []
    state: StateRef
    save: SaveName | None = None
    shared: bool = False


class ForwardSpec(DifferentiatedSpec, frozen=True):
    """Z alone: the outputs of all shards.

    `retain` may hold graphs for a gradient job at cotangents of Z that has the same `wrt`.
    """

    computation: Literal["forward"]
    retain: Retain = 0
    returns: Annotated[Items[ForwardReturned], Field(min_length=1)] = ["outputs"]

    @model_validator(mode="after")
    def _transfer_of_weights(self) -> Self:
        if self.transfer != "exact" and not self.weights:
            raise PydanticCustomError(
                "transfer",
                "transfer: expected 'exact' in a forward without weights, got '{transfer}': "
                "outputs are never rounded",
                {"transfer": self.transfer},
            )
        return self


class MixedGradientSpec(SharedSpec, frozen=True):
    """dt/dy of t = outer(dfdz, x), dfdzᵢ = ∂inner(y, G(zᵢ))/∂zᵢ, with the model as G.

    `inner` takes the members of y by name and v = G(zᵢ) as its one other argument. `outer` takes
    dfdz as its first argument, and by name all of x and as many members of y as it reads.
    """

    computation: Literal["mixed_gradient"]
    inputs: Annotated[Items[InputGroup], Field(min_length=1, max_length=1)]
    inner: TracedFunction
    outer: TracedFunction
    y: Entries[Identifier, TensorRef] = {}
    x: Entries[Identifier, ConstantRef] = {}
    z: Annotated[str, StringConstraints(min_length=1, max_length=100)] | None = None
    returns: Annotated[Items[MixedReturned], Field(min_length=1)] = ["grads"]


class HessianProductSpec(SetLossSpec, frozen=True):
    """H v of each vector: H is the Hessian of a loss over all shards, or its Gauss-Newton matrix.

    `vectors` are rows (V, *shape) by parameter, and zero where one of `wrt` is left out. What the
    loss trains is held constant.
    """

    computation: Literal["hessian_product"]
    loss: Annotated[GraphLoss | BuiltinLoss, Field(discriminator="kind")]
    penalties: Annotated[Items[PenaltySpec], Field(max_length=0)] = []
    devices: Literal[1] = 1
    vectors: Annotated[Entries[TensorName, ConstantRef], Field(min_length=1)]
    kind: CurvatureKind = "hessian"


class InverseHessianSpec(HessianProductSpec, frozen=True):
    """(H + damping I)⁻¹ v of each vector, by conjugate gradients."""

    computation: Literal["inverse_hessian"]  # type: ignore[assignment]
    kind: CurvatureKind = "ggn"
    damping: Rate
    by: Literal["cg"] = "cg"
    max_iterations: Annotated[int, Field(ge=1, le=100_000), NUMBER] = 100
    tolerance: Positive = 1e-5


class AtCotangents(Wire, RunOptions, frozen=True):
    """A computation as it is posted where its loss is cotangents.

    Seed, weights, inputs, mode and all else that decided the outputs are those of the job that the
    loss names, so they cannot be given.
    """

    protocol: Annotated[Literal[1], NUMBER] = PROTOCOL
    loss: CotangentsLoss

    @model_validator(mode="before")
    @classmethod
    def _settled_elsewhere(cls, given: Any) -> Any:
        known = set(GradientSpec.model_fields) - set(cls.model_fields)
        settled = sorted(known & set(given)) if isinstance(given, dict) else []
        if settled:
            raise ValueError(
                f"{', '.join(settled)}: expected none of these beside cotangents, which belong to "
                f"a forward job that has them; leave them out"
            )
        return given


class CotangentGradientSpec(AtCotangents, frozen=True):
    """A `GradientSpec` at cotangents."""

    computation: Literal["gradient"]
    wrt: Annotated[Items[str], Field(min_length=1)] | None = None
    returns: Annotated[Items[CotangentReturned], Field(min_length=1)] = ["grads"]


class CotangentStepSpec(AtCotangents, Update, frozen=True):
    """A `StepSpec` at cotangents of outputs that were computed at the run's weights."""

    returns: Items[CotangentReturned] = []


JobSpec = Annotated[
    GradientSpec
    | StepSpec
    | StateSpec
    | ForwardSpec
    | PerSampleGradientSpec
    | JacobianSpec
    | MixedGradientSpec
    | HessianProductSpec
    | InverseHessianSpec
    | StoreRowsSpec
    | StoreQuerySpec
    | StoreFitSpec,
    Field(discriminator="computation"),
]

JOB_SPEC: Final[TypeAdapter[JobSpec]] = TypeAdapter(JobSpec)


Posted = TypeVar("Posted", bound=BaseModel)
StoreJobSpec = StoreRowsSpec | StoreQuerySpec | StoreFitSpec
PostedSpec = JobSpec | CotangentGradientSpec | CotangentStepSpec


def posted_document(body: bytes) -> dict[str, Any]:
    """Read the JSON of what is posted.

    Raises:
        InvalidJob: it is none, no object, or an object in it names something twice.
    """
    document = _parse_json(body)
    _NAMES.decode(body.decode())
    if not isinstance(document, dict):
        raise InvalidJob(f"the body: expected an object, got {_shown(document)}")
    return document


def parse_posted(body: bytes | dict[str, Any]) -> PostedSpec:
    """Read a job spec as it is posted.

    Raises:
        InvalidJob: as `parse_spec`; or an object names something twice.
    """
    document = body if isinstance(body, dict) else posted_document(body)
    match document:
        case {"computation": "gradient", "loss": {"kind": "cotangents"}}:
            return parse_as(CotangentGradientSpec, document)
        case {"computation": "step", "loss": {"kind": "cotangents"}}:
            return parse_as(CotangentStepSpec, document)
    return _validated(document)


def parse_as(kind: type[Posted], document: dict[str, Any]) -> Posted:
    """Read what is posted and is no job.

    Raises:
        InvalidJob: it is not of this kind; the message is as of `parse_spec`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise InvalidJob(describe_validation(error)) from None


def parse_spec(body: bytes | str | dict[str, Any]) -> JobSpec:
    """Read a job spec.

    Raises:
        InvalidJob: it is not JSON, or not a job; the message names the field, what was expected
            and what was given.
    """
    return _validated(body if isinstance(body, dict) else _parse_json(body))


def _parse_json(body: bytes | str) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise InvalidJob(f"the body: Invalid JSON: {error}") from None


def _refuse_repeated_names(members: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        repeated, _ = Counter(names).most_common(1)[0]
        raise InvalidJob(
            f"the body: expected each name once in an object, got {_shown(repeated)} more than "
            f"once; leave in the one that is meant"
        )


# Of a name that comes twice readers of JSON take the last, the first, or both (RFC 8259).
_NAMES: Final = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_names, parse_int=str, parse_float=str
)


def _validated(document: Any) -> JobSpec:
    try:
        return JOB_SPEC.validate_python(document)
    except ValidationError as error:
        raise InvalidJob(describe_validation(error, below=1)) from None


_UNION_MEMBERS: Final = frozenset({"TensorRef", "bool", "int", "float", "str"})
_SHOULD_BE: Final = "Input should be "


def describe_validation(error: ValidationError, *, below: int = 0) -> str:
    """Say in sentences which fields are wrong and how, at most five of them.

    Args:
        below: how many steps of a field's place to leave out, where the first one only says which
            kind of spec it was.
    """
    messages: dict[tuple[str, str], list[str]] = {}
    for item in error.errors(include_url=False):
        # Pydantic's own names of a union's members, such as function-before[…], say nothing here.
        place = [part for part in map(str, item["loc"][below:]) if "[" not in part]
        if place and place[-1] in _UNION_MEMBERS:
            place.pop()
        message = item["msg"]
        if item["type"] == "union_tag_not_found":
            message = f"expected a field {item['ctx']['discriminator']} that says which kind it is"
        # Sentences of our own say what they got, where it is not all that was given.
        shown = "" if ", got " in message else f" (got {_shown(item['input'])})"
        messages.setdefault((".".join(place) or "the body", shown), []).append(message)
    lines = [
        f"{where}: {' or '.join([first, *(m.removeprefix(_SHOULD_BE) for m in others)])}{shown}"
        for (where, shown), (first, *others) in messages.items()
    ]
    more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "; ".join(lines[:5] + more)


def _shown(given: Any, *, inside: bool = False) -> str:
    """Return the beginning of a value's repr, made without the rest of it."""
    if isinstance(given, dict):
        entries = [f"{k!r}: {_shown(v, inside=True)}" for k, v in islice(given.items(), 10)]
        text = "{…}" if inside and given else "{" + ", ".join(entries) + "}"
    elif isinstance(given, list):
        entries = [_shown(entry, inside=True) for entry in given[:10]]
        text = "[…]" if inside and given else "[" + ", ".join(entries) + "]"
    else:
        text = repr(given[:120] if isinstance(given, str) else given)
    return text if len(text) <= 120 else f"{text[:120]}…"


def spec_digest(spec: BaseModel) -> str:
    """Return the SHA-256 of the spec's canonical JSON (sorted keys, no spaces, no defaults)."""
    plain = spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def names_in(value: object) -> Iterator[str]:
    """Give every blob, job and store that a part of a spec names, wherever in it that is.

    A saved state is named RUN/NAME.
    """
    if isinstance(value, TensorRef | ShardRef):
        yield value.blob
    elif isinstance(value, CotangentsLoss):
        yield value.forward
    elif isinstance(value, SampleSpec) and value.against is not None:
        yield value.against
    elif isinstance(value, StateRef) and value.save is not None:
        yield f"{value.run}/{value.save}"
    if isinstance(value, StoreJobSpec):
        yield value.store
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from names_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from names_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from names_in(item)
