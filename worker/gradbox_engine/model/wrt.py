"""Which parameters, and which arguments of the model, a job differentiates."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from gradbox_engine.errors import BadInputs, UnknownParameter
from gradbox_engine.requests import Group
from gradbox_engine.torch_private import is_traceable_wrapper_subclass

INPUTS = "inputs."
ALL = "*"  # every parameter, of a model without any none


@dataclass(frozen=True)
class Selection:
    """Parameters by their first name in `named_parameters`, and patterns over input names.

    Each pattern says whether it must match an input: not where it matches parameters too, those of
    a module that is called "inputs".
    """

    parameters: dict[str, nn.Parameter]
    input_patterns: dict[str, bool]


def select(
    model: nn.Module,
    wrt: Sequence[str] | None,
    *,
    others: Collection[str] = (),
    every_input: bool = False,
) -> Selection:
    """Resolve `wrt` against the model.

    A tied parameter is found under each of its names and counted once, under the first. Parameters
    that are not floating-point have no gradient and match nothing; nor do those that are made of
    other tensors, as torchao's quantised ones.

    Args:
        wrt: names of parameters, and of modules, which stand for all parameters below them; or
            shell patterns over such names, in which `*` also crosses dots. Or "inputs.NAME". None
            selects every floating-point parameter.
        others: names that a pattern may match without selecting anything here: the loss's own
            parameters, whose gradients always come back.
        every_input: select all inputs where `wrt` names none.

    Raises:
        BadInputs: see `refuse_unusable`.
        UnknownParameter: a pattern other than `*` matches nothing.
    """
    refuse_unusable(model)
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
    selected: set[str] = set(firsts) if wrt is None else set()
    input_patterns: dict[str, bool] = {}
    like_inputs = [name for name in by_name if name.startswith(INPUTS)]
    for pattern in wrt or ():
        names = like_inputs if pattern.startswith(INPUTS) else by_name
        matched = {first_names[id(by_name[name])] for name in matching(pattern, names)}
        if pattern.startswith(INPUTS):
            input_patterns[pattern.removeprefix(INPUTS)] = not matched
        elif not matched and pattern != ALL and not matching(pattern, others):
            raise UnknownParameter(_no_match(pattern, by_name))
        selected |= matched
    if every_input and not any(input_patterns.values()):
        input_patterns[ALL] = True
    # In the model's order, whatever the order of the patterns.
    parameters = {name: p for name, p in firsts.items() if name in selected}
    return Selection(parameters, input_patterns)


def refuse_unusable(model: nn.Module) -> None:
    """Check that every module has its parameters, and its state in Python.

    Raises:
        BadInputs: a lazy one was never called, or one is TorchScript's.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise BadInputs(
                f"module {name!r}: expected a module of Python code, got one of TorchScript, whose "
                f"state no job can put back; register the module that it was made of"
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise BadInputs(
                f"module {name!r}: expected parameters of known shapes, got "
                f"{type(module).__name__} before its first call; call the model once where it is "
                f"built"
            )


def matched_inputs(
    groups: Sequence[Group], patterns: Mapping[str, bool]
) -> dict[str, tuple[str, ...]]:
    """Return which arguments of which group the patterns name, as the first shards tell.

    Args:
        patterns: as in a `Selection`.

    Raises:
        UnknownParameter: a pattern that must match a floating-point argument matches none.
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
    for pattern, needed in patterns.items():
        matched = any(_matches(g, name, [pattern]) for g, names in known.items() for name in names)
        if needed and not matched:
            raise UnknownParameter(
                f"wrt: expected {INPUTS + pattern!r} to match a floating-point argument, got none; "
                f"there are {known}"
            )
    return {g: tuple(n for n in names if _matches(g, n, patterns)) for g, names in known.items()}


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that a pattern is, or that are in a module of this name.

    Only where there are none is it read as a pattern: names may have `[`, `]`, `?` and `*`.
    """
    exact = [name for name in names if name == pattern or name.startswith(f"{pattern}.")]
    below = f"{pattern}.*"
    return exact or [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, below)]


def near_misses(pattern: str, names: Collection[str]) -> str:
    """Return the parameters and modules that a pattern may have meant, in words."""
    modules = {name[:at] for name in names for at, char in enumerate(name) if char == "."}
    known = [*sorted(modules), *names]
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or list(names)[:3]
    return ", ".join(map(repr, close)) or "nothing"


def _no_match(pattern: str, by_name: Collection[str]) -> str:
    return (
        f"wrt: expected a pattern that matches a floating-point parameter, or a module that has "
        f"some, got {pattern!r}, which matches none of {len(by_name)}; did you mean "
        f"{near_misses(pattern, by_name)}?"
    )


def _matches(group: str, name: str, patterns: Collection[str]) -> bool:
    return any(
        full == pattern or fnmatchcase(full, pattern)
        for pattern in patterns
        for full in (name, f"{group}.{name}")
    )
