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
class Option:
    """A Python value that changes what a loss computes."""

    default: float | str
    meaning: str
    above: float | None = None  # a number must be greater than this
    at_least: float | None = None
    choices: tuple[str, ...] = ()  # a string must be one of these


@dataclass(frozen=True)
class Signature:
    """A builtin loss: its tensors in order, which of them may be left out, its options.

    The first tensor is Z where the job has one unnamed group of inputs. Every other tensor is
    either another group of inputs or a loss input, by its name. `summary` is the first line of
    the function's docstring, `shapes` has one entry a tensor.
    """

    summary: str
    tensors: tuple[str, ...]
    shapes: tuple[str, ...]
    options: Mapping[str, Option]
    optional: tuple[str, ...] = ()


_TEMPERATURE = "divides the cosines"
_ROOT = "added to a variance under its root"
_PAIR = ("(N, D), or (2N, D) without the second", "(N, D)")

BUILTIN_SIGNATURES: Final[Mapping[str, Signature]] = {
    "info_nce": Signature(
        "Contrast each query's passage with all other passages.",
        ("queries", "passages"),
        (_PAIR[0], "(M, D), M ≥ N: those from N on are hard negatives"),
        {"temperature": Option(0.05, _TEMPERATURE, above=0.0)},
        optional=("passages",),
    ),
    "clip_symmetric": Signature(
        "Classify the text of each image and the image of each text.",
        ("images", "texts", "log_scale"),
        (*_PAIR, "()"),
        {"temperature": Option(0.07, f"{_TEMPERATURE} where there is no log_scale", above=0.0)},
        optional=("texts", "log_scale"),
    ),
    "supervised_contrastive": Signature(
        "Draw samples of one class together, against all others.",
        ("z", "labels"),
        ("(N, D)", "(N,) whole numbers"),
        {"temperature": Option(0.07, _TEMPERATURE, above=0.0)},
    ),
    "vicreg": Signature(
        "Hold two views together, each feature's spread up, and features uncorrelated.",
        ("left", "right"),
        _PAIR,
        {
            "invariance": Option(25.0, "weight of the views' distance", at_least=0.0),
            "variance": Option(25.0, "weight of the spread", at_least=0.0),
            "covariance": Option(1.0, "weight of the correlation", at_least=0.0),
            "epsilon": Option(1e-4, _ROOT, above=0.0),
        },
        optional=("right",),
    ),
    "barlow_twins": Signature(
        "Make the cross-correlation of two views the identity.",
        ("left", "right"),
        _PAIR,
        {
            "redundancy": Option(0.0051, "weight of the entries off the diagonal", at_least=0.0),
            "epsilon": Option(1e-5, _ROOT, above=0.0),
        },
        optional=("right",),
    ),
    "mmd": Signature(
        "Squared maximum mean discrepancy of two samples under a Gaussian kernel.",
        ("z", "reference"),
        ("(N, D)", "(M, D)"),
        {"bandwidth": Option(1.0, "the kernel's standard deviation", above=0.0)},
    ),
    "wasserstein_1d": Signature(
        "p-th power of the p-Wasserstein distance of two samples, feature by feature, averaged.",
        ("z", "reference"),
        ("(N,) or (N, D)", "as z"),
        {"power": Option(2.0, "p", at_least=1.0)},
    ),
    "triplet_all": Signature(
        "Every anchor with every positive and every negative.",
        ("z", "labels"),
        ("(N, D)", "(N,) whole numbers"),
        {"margin": Option(0.2, "by which negatives shall be farther, squared", at_least=0.0)},
    ),
    "cox_partial_likelihood": Signature(
        "Negative log partial likelihood of a proportional hazards model, per event.",
        ("z", "times", "events"),
        ("(N,) or (N, 1)", "(N,)", "(N,), 1 where the event was seen, else 0"),
        {},
    ),
    "cross_entropy": Signature(
        "Classify each sample.",
        ("z", "labels"),
        ("(N, C) or (N, C, ...)", "(N,) whole numbers, or (N, ...), or probabilities as z"),
        {
            "label_smoothing": Option(0.0, "share of the target on all classes", at_least=0.0),
            "reduction": Option("mean", "over the samples", choices=("mean", "sum")),
        },
    ),
}


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
    for option, value in options.items():
        if option not in signature.options:
            raise InvalidJob(
                f"loss: {name} has no option {option!r}; it has "
                f"{', '.join(signature.options) or 'none'}"
            )
        _check_option(f"loss: {name}'s option {option}", value, signature.options[option])
    _check_tensors(name, signature, groups, inputs)


def _check_option(what: str, value: Any, option: Option) -> None:
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
    name: str, signature: Signature, groups: Sequence[str], inputs: Collection[str]
) -> None:
    given_groups = [signature.tensors[0]] if len(groups) == 1 else list(groups)
    given = [*given_groups, *inputs]
    takes = (
        f"{name} takes {', '.join(signature.tensors)}"
        + (f" ({', '.join(signature.optional)} may be left out)" if signature.optional else "")
        + ": the first is the outputs of the one group of inputs; with several groups each goes by "
        "its name; the rest are loss_inputs"
    )
    unknown = [tensor for tensor in given if tensor not in signature.tensors]
    if unknown:
        raise InvalidInputs(f"loss: {', '.join(unknown)} is no tensor of this loss; {takes}")
    if len(set(given)) != len(given):
        raise InvalidInputs(f"loss: one tensor is given twice ({', '.join(given)}); {takes}")
    missing = set(signature.tensors) - set(given) - set(signature.optional)
    if missing:
        raise InvalidInputs(f"loss: {', '.join(sorted(missing))} is missing; {takes}")
