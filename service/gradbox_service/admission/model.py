"""Which model a job means by NAME or NAME@VERSION, and whether the shards fit its entry points."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from gradbox.errors import InvalidInputs, ServiceUnavailable, UnknownModel, UnusableModel
from gradbox.protocol import InputGroup, MethodView, ModelView, SharedSpec
from gradbox_service.admission.tensors import TensorHeaders
from gradbox_service.fleet import Fleet, WorkerPresence
from gradbox_service.fleet.workers import offered_versions, unusable_models

MIN_VERSION_LENGTH = 8
# How old a look at a model's description may be, which changes only with a worker.
DESCRIBED_WITHIN_S = 1.0


def find_model(reference: str, *, workers: Sequence[WorkerPresence], fleet: Fleet) -> ModelView:
    """Return the model that `workers` offer under this reference.

    NAME alone means the version that most workers offer. VERSION may be cut short, to no fewer than
    eight characters.

    Raises:
        UnknownModel: no worker offers it; the message lists what there is.
        UnusableModel: it is registered, but no worker could build it; the message says why.
        ServiceUnavailable: workers are still starting, so nobody can say.
    """
    name, at, wanted = reference.partition("@")
    offered = offered_versions(workers)
    if name not in offered:
        if not offered or any(worker.state == "starting" for worker in workers):
            raise ServiceUnavailable(
                f"no worker offers a model {name!r} now, and one is starting or none runs; try "
                "again in a few seconds"
            )
        unusable = unusable_models(workers)
        if name in unusable:
            raise UnusableModel(
                f"the model {name!r} is registered on this box but cannot be used: "
                f"{unusable[name]} (once that is mended, the box's owner runs `gradbox models "
                f"reload`)"
            )
        raise unknown_model(name, list(offered))
    version = version_among(name, wanted, offered[name]) if at else offered[name][0]
    view = fleet.model(name, version=version, within_s=DESCRIBED_WITHIN_S)
    if view is None:
        raise ServiceUnavailable(f"the model {name!r} is being described; try again in a second")
    return view


def version_among(name: str, wanted: str, offered: list[str]) -> str:
    """Return the version that begins with these characters.

    Raises:
        UnknownModel: none of those that are offered does, or several, or they are too few.
    """
    found = [version for version in offered if version.startswith(wanted)]
    if wanted in offered:
        return wanted
    if len(wanted) < MIN_VERSION_LENGTH:
        raise UnknownModel(
            f"model {name!r}: a version needs at least {MIN_VERSION_LENGTH} characters, got "
            f"{wanted!r}; the box has {_shortened(offered)}"
        )
    if len(found) != 1:
        problem = "is not on this box" if not found else "is several versions"
        raise UnknownModel(
            f"model {name!r}: {wanted[:16]!r} {problem}; it has {_shortened(offered)}; name one of "
            "those, or leave the version out"
        )
    return found[0]


def unknown_model(name: str, offered: list[str]) -> UnknownModel:
    """Return the error that says which models there are."""
    close = difflib.get_close_matches(name, offered, n=1)
    hint = (
        f"did you mean {close[0]!r}?" if close else "ask the box's owner to add it to models.toml"
    )
    return UnknownModel(
        f"no model {name[:80]!r} is on this box; it has {', '.join(offered)}; {hint}"
    )


def _shortened(versions: list[str]) -> list[str]:
    return [version[:16] for version in versions]


def check_groups(spec: SharedSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check every group of inputs.

    Raises:
        InvalidInputs: the registry does not allow the entry point, the shards of a group differ in
            their arguments, or the arguments are not those of the entry point.
    """
    for group in spec.inputs:
        method = model.methods.get(group.method)
        if method is None:
            raise InvalidInputs(
                f"group {group.name!r}: model {model.name!r} has no entry point {group.method!r}; "
                f"models.toml allows {sorted(model.methods)}"
            )
        _check_fit(_common_arguments(group, tensors), group, method, model.name)


def _common_arguments(group: InputGroup, tensors: TensorHeaders) -> set[str]:
    """Return the argument names that all shards of the group have."""
    first: set[str] = set()
    for index, shard in enumerate(group.shards):
        where = f"shard {index} of group {group.name!r}"
        names = set(tensors.arguments(shard, where=where))
        if index == 0:
            first = names
        elif names != first:
            raise InvalidInputs(
                f"{where} has the arguments {sorted(names)}, expected {sorted(first)} like shard 0"
            )
    return first


def _check_fit(names: set[str], group: InputGroup, method: MethodView, model: str) -> None:
    call = f"group {group.name!r}: {model}.{group.method}({', '.join(method.arguments)})"
    positions = sorted(int(name) for name in names if _is_position(name))
    keywords = {name for name in names if not _is_position(name)}
    if positions != list(range(len(positions))):
        raise InvalidInputs(f"{call}: positions must be 0, 1, 2, … without a gap, got {positions}")
    if len(positions) > len(method.arguments) and not method.any_positional:
        raise InvalidInputs(
            f"{call} takes {len(method.arguments)} arguments, got {len(positions)} by position; "
            f"labels and what else the loss reads belong in loss_inputs"
        )
    by_position = set(method.arguments[: len(positions)])
    _refuse_any(keywords & by_position, f"{call}: given by position and by name")
    _refuse_any(
        {name for name in keywords if not name.isidentifier()},
        f"{call}: an argument's name is an identifier or a whole number, got",
    )
    if not method.any_keyword:
        _refuse_any(keywords - set(method.arguments), f"{call} has no argument")
    missing = set(method.required) - keywords - by_position
    if missing == set(method.required) and len(missing) == 1 < len(keywords):
        call = f"{call} (if that argument is a dict of these, wrap the model: docs/models.md)"
    _refuse_any(missing, f"{call}: got {sorted(names)}, missing")


def _is_position(name: str) -> bool:
    """Return whether this is a whole number as it is written without leading zeros."""
    return name.isascii() and name.isdigit() and len(name) < 6 and str(int(name)) == name


def _refuse_any(names: Collection[str], message: str) -> None:
    if names:
        raise InvalidInputs(f"{message} {sorted(names)}")
