"""Do the shards' arguments fit the entry point that they are put through?"""

from __future__ import annotations

from collections.abc import Collection

from gradbox.errors import InvalidInputs
from gradbox.protocol import InputGroup, MethodView, ModelView, SharedSpec
from gradbox_service.admission.tensors import TensorHeaders


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
    """Tell whether this is a whole number as it is written without leading zeros."""
    return name.isascii() and name.isdigit() and len(name) < 6 and str(int(name)) == name


def _refuse_any(names: Collection[str], message: str) -> None:
    if names:
        raise InvalidInputs(f"{message} {sorted(names)}")
