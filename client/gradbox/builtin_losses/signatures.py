"""What each builtin loss takes, without torch: the service refuses a wrong name, option or tensor.

`gradbox.builtin_losses.functions` holds the functions; a test keeps the two in step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from gradbox.errors import InvalidInputs, InvalidJob


@dataclass(frozen=True)
class LossTensor:
    """A tensor that a loss takes, in the order of its arguments."""

    name: str
    shape: str
    required: bool = True


@dataclass(frozen=True)
class LossOption:
    """A Python value that changes what a loss computes.

    A number is greater than `above` or at least `at_least`; a string is one of `choices`.
    """

    name: str
    default: float | str
    meaning: str
    above: float | None = None
    at_least: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossSignature:
    """A loss that a job may name: `{"kind": "builtin", "name": …, "options": {…}}`.

    The first tensor is Z where the job has one unnamed group of inputs. Every other tensor is
    either another group of inputs or a loss input, by its name. `summary` is the first line of
    the function's docstring.
    """

    name: str
    summary: str
    tensors: tuple[LossTensor, ...]
    options: tuple[LossOption, ...] = ()


def _temperature(default: float, where: str = "") -> LossOption:
    return LossOption("temperature", default, f"divides the cosines{where}", above=0.0)


def _weight(name: str, default: float, of: str) -> LossOption:
    return LossOption(name, default, f"weight of {of}", at_least=0.0)


def _epsilon(default: float) -> LossOption:
    return LossOption("epsilon", default, "added to a variance under its root", above=0.0)


def _pair(first: str, second: str) -> tuple[LossTensor, LossTensor]:
    return (
        LossTensor(first, "(N, D), or (2N, D) without the second"),
        LossTensor(second, "(N, D)", required=False),
    )


_Z: Final = LossTensor("z", "(N, D)")
_CLASSES: Final = LossTensor("labels", "(N,) whole numbers")

_SIGNATURES: Final = (
    LossSignature(
        "info_nce",
        "Contrast each query's passage with all other passages.",
        (
            LossTensor("queries", "(N, D), or (2N, D) without the second"),
            LossTensor("passages", "(M, D), M ≥ N: those from N on are hard negatives", False),
        ),
        (_temperature(0.05),),
    ),
    LossSignature(
        "clip_symmetric",
        "Classify the text of each image and the image of each text.",
        (*_pair("images", "texts"), LossTensor("log_scale", "()", required=False)),
        (_temperature(0.07, " where there is no log_scale"),),
    ),
    LossSignature(
        "supervised_contrastive",
        "Draw samples of one class together, against all others.",
        (_Z, _CLASSES),
        (_temperature(0.07),),
    ),
    LossSignature(
        "vicreg",
        "Hold two views together, each feature's spread up, and features uncorrelated.",
        _pair("left", "right"),
        (
            _weight("invariance", 25.0, "the views' distance"),
            _weight("variance", 25.0, "the spread"),
            _weight("covariance", 1.0, "the correlation"),
            _epsilon(1e-4),
        ),
    ),
    LossSignature(
        "barlow_twins",
        "Make the cross-correlation of two views the identity.",
        _pair("left", "right"),
        (_weight("redundancy", 0.0051, "the entries off the diagonal"), _epsilon(1e-5)),
    ),
    LossSignature(
        "mmd",
        "Squared maximum mean discrepancy of two samples under a Gaussian kernel.",
        (_Z, LossTensor("reference", "(M, D)")),
        (LossOption("bandwidth", 1.0, "the kernel's standard deviation", above=0.0),),
    ),
    LossSignature(
        "wasserstein_1d",
        "p-th power of the p-Wasserstein distance of two samples, feature by feature, averaged.",
        (LossTensor("z", "(N,) or (N, D)"), LossTensor("reference", "as z")),
        (LossOption("power", 2.0, "p", at_least=1.0),),
    ),
    LossSignature(
        "triplet_all",
        "Every anchor with every positive and every negative.",
        (_Z, _CLASSES),
        (LossOption("margin", 0.2, "by which negatives shall be farther, squared", at_least=0.0),),
    ),
    LossSignature(
        "cox_partial_likelihood",
        "Negative log partial likelihood of a proportional hazards model, per event.",
        (
            LossTensor("z", "(N,) or (N, 1)"),
            LossTensor("times", "(N,)"),
            LossTensor("events", "(N,), 1 where the event was seen, else 0"),
        ),
    ),
    LossSignature(
        "cross_entropy",
        "Classify each sample.",
        (
            LossTensor("z", "(N, C) or (N, C, ...)"),
            LossTensor("labels", "(N,) whole numbers, or (N, ...), or probabilities as z"),
        ),
        (
            LossOption("label_smoothing", 0.0, "share of the target on all classes", at_least=0.0),
            LossOption("reduction", "mean", "over the samples", choices=("mean", "sum")),
        ),
    ),
)

BUILTIN_SIGNATURES: Final = {signature.name: signature for signature in _SIGNATURES}


def check_builtin(
    name: str, options: Mapping[str, Any], *, groups: Sequence[str], inputs: Collection[str]
) -> None:
    """Refuse a builtin loss that cannot be called as a job says.

    Args:
        name: the loss's name.
        options: its options by name.
        groups: the names of the job's groups of inputs; a single one is the first argument,
            whatever its name.
        inputs: the names of the loss inputs that are tensors.

    Raises:
        InvalidJob: no such loss, no such option, or not a value the option can have.
        InvalidInputs: a tensor that the loss needs is missing, or one is given that it lacks.
    """
    signature = BUILTIN_SIGNATURES.get(name)
    if signature is None:
        close = get_close_matches(name, BUILTIN_SIGNATURES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidJob(
            f"loss: no builtin is called {name!r}; there are {', '.join(BUILTIN_SIGNATURES)}{hint}"
        )
    known = {option.name: option for option in signature.options}
    for option, value in options.items():
        if option not in known:
            raise InvalidJob(
                f"loss: {name} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        _check_option(f"loss: {name}'s option {option}", value, known[option])
    _check_tensors(signature, groups, inputs)


def _check_option(what: str, value: Any, option: LossOption) -> None:
    if isinstance(option.default, str):
        if value not in option.choices:
            raise InvalidJob(f"{what} is one of {', '.join(option.choices)}; got {value!r}")
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise InvalidJob(f"{what} is a finite number; got {value!r}")
    if option.above is not None and not value > option.above:
        raise InvalidJob(f"{what} must be greater than {option.above}; got {value}")
    if option.at_least is not None and value < option.at_least:
        raise InvalidJob(f"{what} must be at least {option.at_least}; got {value}")


def _check_tensors(
    signature: LossSignature, groups: Sequence[str], inputs: Collection[str]
) -> None:
    names = [tensor.name for tensor in signature.tensors]
    optional = [tensor.name for tensor in signature.tensors if not tensor.required]
    given_groups = [names[0]] if len(groups) == 1 else list(groups)
    given = [*given_groups, *inputs]
    takes = (
        f"{signature.name} takes {', '.join(names)}"
        + (f" ({', '.join(optional)} may be left out)" if optional else "")
        + ": the first is the outputs of the one group of inputs; with several groups each goes by "
        "its name; the rest are loss_inputs"
    )
    unknown = [tensor for tensor in given if tensor not in names]
    if unknown:
        raise InvalidInputs(f"loss: {', '.join(unknown)} is no tensor of this loss; {takes}")
    if len(set(given)) != len(given):
        raise InvalidInputs(f"loss: one tensor is given twice ({', '.join(given)}); {takes}")
    missing = set(names) - set(given) - set(optional)
    if missing:
        raise InvalidInputs(f"loss: {', '.join(sorted(missing))} is missing; {takes}")
