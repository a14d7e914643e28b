"""The optimizers that a run can have, with the options that each takes: those of `torch.optim`.

Known here without torch, so that a wrong name or number is refused before a run is made. Which of
them the box's torch has, its worker says; a test keeps this table in step with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from gradbox.errors import InvalidJob
from gradbox.graphs.wire_form import Entries, Items
from gradbox.protocol.spec_fields import Identifier, Scalar, Wire

OptionValue = Scalar | list[float | None]


class OptimizerGroup(Wire, frozen=True):
    """Options of the parameters whose names match one of the patterns in `wrt`."""

    wrt: Annotated[
        Items[Annotated[str, StringConstraints(min_length=1, max_length=500)]], Field(min_length=1)
    ]
    options: Entries[Identifier, OptionValue] = {}


class OptimizerSpec(Wire, frozen=True):
    """An optimizer by name, its options, and those of groups of parameters.

    A parameter belongs to the first group that names it.
    """

    name: Identifier
    options: Entries[Identifier, OptionValue] = {}
    groups: Annotated[Items[OptimizerGroup], Field(max_length=100)] = []


# What an option may be, in words, and whether a value is that.
Kind = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(count: int, allowed: Callable[[float], bool]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, list | tuple) or len(value) != count:
            return False
        return all(_is_number(entry) and allowed(entry) for entry in value)

    return fits


FLAG: Final[Kind] = ("True or False", lambda value: isinstance(value, bool))
NUMBER: Final[Kind] = ("a number", _is_number)
AT_LEAST_0: Final[Kind] = ("a number, 0 or more", lambda value: _is_number(value) and value >= 0)
ABOVE_0: Final[Kind] = ("a number above 0", lambda value: _is_number(value) and value > 0)
BETAS: Final[Kind] = (
    "two numbers, each from 0 up to but not 1",
    _numbers(2, lambda entry: 0 <= entry < 1),
)
COEFFICIENTS: Final[Kind] = ("three numbers", _numbers(3, lambda entry: True))
STEPS: Final[Kind] = (
    "a whole number from 1 to 99",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 100,
)
ADAFACTOR_EPS: Final[Kind] = (
    "two numbers, 0 or more, the first of which may be None",
    lambda value: _numbers(2, lambda entry: entry >= 0)(
        [0.0 if entry is None else entry for entry in value[:1]] + list(value[1:])
        if isinstance(value, list | tuple)
        else value
    ),
)
ADJUSTED: Final[Kind] = (
    "'original' or 'match_rms_adamw'",
    lambda value: value in (None, "original", "match_rms_adamw"),
)

_ALL: Final = {"lr": AT_LEAST_0, "weight_decay": AT_LEAST_0}
_ADAM: Final = _ALL | {"betas": BETAS, "eps": AT_LEAST_0, "maximize": FLAG}
OPTIONS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "adafactor": _ALL
    | {"beta2_decay": NUMBER, "eps": ADAFACTOR_EPS, "d": ABOVE_0, "maximize": FLAG},
    "adagrad": _ALL
    | {
        "lr_decay": AT_LEAST_0,
        "initial_accumulator_value": AT_LEAST_0,
        "eps": AT_LEAST_0,
        "maximize": FLAG,
    },
    "adam": _ADAM | {"amsgrad": FLAG, "decoupled_weight_decay": FLAG},
    "adamax": _ADAM,
    "adamw": _ADAM | {"amsgrad": FLAG},
    "muon": _ALL
    | {
        "momentum": AT_LEAST_0,
        "nesterov": FLAG,
        "ns_coefficients": COEFFICIENTS,
        "eps": AT_LEAST_0,
        "ns_steps": STEPS,
        "adjust_lr_fn": ADJUSTED,
    },
    "nadam": _ADAM | {"momentum_decay": AT_LEAST_0, "decoupled_weight_decay": FLAG},
    "radam": _ADAM | {"decoupled_weight_decay": FLAG},
    "rmsprop": _ALL
    | {
        "alpha": AT_LEAST_0,
        "eps": AT_LEAST_0,
        "momentum": AT_LEAST_0,
        "centered": FLAG,
        "maximize": FLAG,
    },
    "sgd": _ALL | {"momentum": AT_LEAST_0, "dampening": NUMBER, "nesterov": FLAG, "maximize": FLAG},
}
"""By optimizer and option. How an update is computed (fused, foreach) is not an option here."""


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raises:
    InvalidJob: there is no such optimizer, or it has no such option, or not with that value.
    """
    known = OPTIONS.get(spec.name)
    if known is None:
        close = get_close_matches(spec.name.lower(), OPTIONS, n=1)
        raise InvalidJob(
            f"optimizer: expected one of {', '.join(OPTIONS)}, got {spec.name!r}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    for options in [spec.options, *(group.options for group in spec.groups)]:
        for name, value in options.items():
            if name not in known:
                raise InvalidJob(
                    f"optimizer {spec.name!r}: expected options out of {', '.join(known)}, got "
                    f"{name!r}"
                )
            meaning, fits = known[name]
            if not fits(value):
                raise InvalidJob(
                    f"optimizer {spec.name!r}: {name}: expected {meaning}, got {value!r:.80}"
                )
