"""The optimizers of `torch.optim` that a run can have, by name, and how one is made.

What an optimizer computes is torch's. Adam and AdamW take torch's fused update, one pass over
memory instead of about ten; it rounds as the plain one does or better, and the same on every call.
That of SGD fails where a parameter has its first step after others had theirs (torch 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gradbox_engine.errors import BadOptimizer
from gradbox_engine.model.wrt import matching, near_misses

CLASSES: Final[Mapping[str, str]] = {
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "muon": "Muon",  # of matrices alone
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
FUSED: Final = frozenset({"adam", "adamw"})
# How an update is computed is not the user's: none of these changes what it is.
OURS: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class ParameterGroup:
    """Options for the parameters that the patterns name, as those of a job's `wrt` do."""

    wrt: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerChoice:
    """Which optimizer, and with what options.

    A parameter belongs to the first group that has it, else to the rest, with `options` alone.
    """

    name: str
    options: Mapping[str, Any]
    groups: Sequence[ParameterGroup] = ()

    def check_groups(self, names: Collection[str]) -> None:
        """Check that each pattern of a group names a parameter.

        Args:
            names: of all that is trained.

        Raises:
            BadOptimizer: one names none.
        """
        for group in self.groups:
            for pattern in group.wrt:
                if not matching(pattern, names):
                    raise BadOptimizer(
                        f"optimizer {self.name!r}: groups: expected patterns that match a "
                        f"parameter which the run trains, got {pattern!r}, which matches none of "
                        f"{len(names)}; did you mean {near_misses(pattern, names)}?"
                    )

    def build(self, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters, with one group of torch's for each group.

        Raises:
            BadOptimizer: torch has no such optimizer, or refuses an option or a parameter.
        """
        kind = getattr(torch.optim, CLASSES.get(self.name, ""), None)
        if kind is None:
            raise BadOptimizer(
                f"optimizer: expected one of {', '.join(available())}, got {self.name!r}"
            )
        taken = inspect.signature(kind).parameters
        fused = {"fused": True} if self._is_fused(parameters.values()) else {}
        groups: list[dict[str, Any]] = []
        numbers = self._group_numbers(parameters)
        for number, options in enumerate([*(group.options for group in self.groups), {}]):
            members = [p for name, p in parameters.items() if numbers[name] == number]
            self._check(options, taken.keys() - OURS)
            groups.append({"params": members, **_as_torch_has_it(options)})
        self._check(self.options, taken.keys() - OURS)
        try:
            return kind(groups, **_as_torch_has_it(self.options), **fused)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise BadOptimizer(f"optimizer {self.name!r}: torch refuses it: {error}") from error

    def _group_numbers(self, names: Collection[str]) -> dict[str, int]:
        """Return the group of each parameter; the rest has the number behind the last."""
        numbers = dict.fromkeys(names, len(self.groups))
        for number, group in reversed([*enumerate(self.groups)]):
            for pattern in group.wrt:
                numbers.update(dict.fromkeys(matching(pattern, names), number))
        return numbers

    def _is_fused(self, parameters: Iterable[Tensor]) -> bool:
        devices = {parameter.device.type for parameter in parameters}
        return self.name in FUSED and devices <= {"cpu", "cuda"}

    def _check(self, options: Mapping[str, Any], known: Iterable[str]) -> None:
        unknown = sorted(options.keys() - known)
        if unknown:
            raise BadOptimizer(
                f"optimizer {self.name!r}: expected options out of {', '.join(sorted(known))}, "
                f"got {', '.join(unknown)}"
            )


def available() -> list[str]:
    """Return the names of the optimizers that this torch has."""
    return [name for name, kind in CLASSES.items() if hasattr(torch.optim, kind)]


def _as_torch_has_it(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples in place of the lists that came as JSON."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
