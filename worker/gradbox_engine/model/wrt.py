"""Which parameters, and which arguments of the model, a job differentiates."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradbox_engine.errors import BadInputs, UnknownParameter
from gradbox_engine.requests import Group

INPUTS = "inputs."
ALL = "*"  # every parameter, of a model without any none


@dataclass(frozen=True)
class Selection:
    """Parameters by their first name in `named_parameters`, and patterns over input names."""

    parameters: dict[str, nn.Parameter]
    input_patterns: tuple[str, ...]


def select(
    model: nn.Module, wrt: Sequence[str] | None, *, others: Collection[str] = ()
) -> Selection:
    """Resolve `wrt` against the model.

    A tied parameter is found under each of its names and counted once, under the first. Parameters
    that are not floating-point have no gradient and match nothing; nor do those that are made of
    other tensors, as torchao's quantised ones.

    Args:
        wrt: shell patterns over names of parameters, and of modules, which stand for all
            parameters below them; `*` also crosses dots. Or "inputs.NAME". None selects every
            floating-point parameter.
        others: names that a pattern may match without selecting anything here: the loss's own
            parameters, whose gradients always come back.

    Raises:
        BadInputs: a module has no parameters yet.
        UnknownParameter: a pattern other than `*` matches nothing.
    """
    refuse_uninitialised(model)
    first_names: dict[int, str] = {}
    by_name: dict[str, nn.Parameter] = {}
    firsts: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        numeric = parameter.is_floating_point() or parameter.is_complex()
        if numeric and not is_traceable_wrapper_subclass(parameter):
            by_name[name] = parameter
            if first == name:
                firsts[name] = parameter
    if wrt is None:
        return Selection(firsts, ())
    selected: set[str] = set()
    for pattern in wrt:
        if pattern.startswith(INPUTS):
            continue
        matched = {first_names[id(p)] for name, p in by_name.items() if _names(pattern, name)}
        if not matched and pattern != ALL and not any(_names(pattern, name) for name in others):
            raise UnknownParameter(_no_match(pattern, by_name))
        selected |= matched
    # In the model's order, whatever the order of the patterns.
    parameters = {name: p for name, p in firsts.items() if name in selected}
    patterns = tuple(p.removeprefix(INPUTS) for p in wrt if p.startswith(INPUTS))
    return Selection(parameters, patterns)


def refuse_uninitialised(model: nn.Module) -> None:
    """Check that every module has its parameters.

    Raises:
        BadInputs: a lazy one was never called.
    """
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise BadInputs(
                f"module {name!r}: expected parameters of known shapes, got "
                f"{type(module).__name__} before its first call; call the model once where it is "
                f"built"
            )


def matched_inputs(groups: Sequence[Group], patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which arguments of which group the patterns name, as the first shards tell.

    Raises:
        UnknownParameter: a pattern matches no floating-point argument.
    """
    if not patterns:
        return {group.name: () for group in groups}
    known = {
        group.name: [
            name
            for name, value in group.shards[0].items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        for group in groups
    }
    for pattern in patterns:
        if not any(_matches(g, name, [pattern]) for g, names in known.items() for name in names):
            raise UnknownParameter(
                f"wrt: expected {INPUTS + pattern!r} to match a floating-point argument, got none; "
                f"there are {known}"
            )
    return {g: tuple(n for n in names if _matches(g, n, patterns)) for g, names in known.items()}


def _names(pattern: str, parameter: str) -> bool:
    """Whether a pattern matches a parameter's name, or that of a module which it is in."""
    return fnmatchcase(parameter, pattern) or fnmatchcase(parameter, f"{pattern}.*")


def _no_match(pattern: str, by_name: dict[str, nn.Parameter]) -> str:
    modules = {name[:at] for name in by_name for at, char in enumerate(name) if char == "."}
    known = [*sorted(modules), *by_name]
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or list(by_name)[:3]
    return (
        f"wrt: expected a pattern that matches a floating-point parameter, or a module that has "
        f"some, got {pattern!r}, which matches none of {len(by_name)}; did you mean "
        f"{', '.join(map(repr, close)) or 'nothing'}?"
    )


def _matches(group: str, name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(f"{group}.{name}", pattern)
        for pattern in patterns
    )
