"""What a run trains with: an optimizer of `torch.optim` by name, and an adapter of low rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradbox.computations.computation import checked, globs
from gradbox.errors import InvalidJob
from gradbox.protocol import LoRASpec, OptimizerSpec, check_optimizer

WRT = "wrt"


class Optimizer:
    """An optimizer of `torch.optim` by its name in small letters, with that one's own options.

        Optimizer("adamw", lr=2e-5, weight_decay=0.01)
        Optimizer("sgd", lr=0.1, momentum=0.9, groups=[{"wrt": "*.bias", "lr": 0.2}])

    Names are sgd, adam, adamw, nadam, radam, adamax, adagrad, rmsprop, adafactor, and muon where
    the box's torch has it.

    Args:
        groups: options of some parameters in place of those of all: dicts as torch's parameter
            groups are, with `wrt`, globs over names, where torch has `params`. A parameter belongs
            to the first group that names it.
        options: lr, weight_decay, betas and the like. How an update is computed (fused, foreach) is
            the box's to say.

    Raises:
        InvalidJob: there is no such optimizer, or it has no such option, or not with that value.
    """

    def __init__(
        self, name: str, /, *, groups: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> None:
        self.name = name
        self.groups = [dict(_checked_group(group)) for group in groups]
        self.options = options
        self.spec = checked(
            OptimizerSpec,
            where="optimizer",
            name=name,
            options=_plain(options),
            groups=[
                {"wrt": globs(group[WRT]), "options": _plain(group, without=WRT)}
                for group in self.groups
            ],
        )
        check_optimizer(self.spec)

    def __repr__(self) -> str:
        options = {**self.options, **({"groups": self.groups} if self.groups else {})}
        shown = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"Optimizer({self.name!r}{shown})"


class LoRA:
    """An adapter of low rank beside linear layers: W x + (alpha / rank) B A dropout(x).

        client.train("base", adapter=LoRA(rank=8, alpha=16, targets="*.query|*.value"), ...)

    A (rank, in) and B (out, rank) are trained, and W stays; B is 0 at first. The box makes it by
    peft.

    Args:
        rank: of A and B.
        alpha: alpha / rank is the factor before B A.
        targets: globs over the names of the layers, in a list or with | between them.
        dropout: the share of x that is dropped in train mode.

    Raises:
        InvalidJob: a number is none that an adapter can have.

    Source: Hu et al. 2021, "LoRA: low-rank adaptation of large language models".
    """

    def __init__(
        self, rank: int, alpha: float, targets: str | Sequence[str], dropout: float = 0.0
    ) -> None:
        patterns = targets.split("|") if isinstance(targets, str) else globs(targets)
        self.spec = checked(
            LoRASpec, where="LoRA", rank=rank, alpha=alpha, targets=patterns, dropout=dropout
        )

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"LoRA(rank={spec.rank}, alpha={spec.alpha:g}, targets={[*spec.targets]!r}, "
            f"dropout={spec.dropout:g})"
        )


def _checked_group(group: Any) -> Mapping[str, Any]:
    if not isinstance(group, Mapping) or WRT not in group:
        raise InvalidJob(
            f"optimizer: groups: expected dicts with the names of their parameters, such as "
            f"{{'wrt': '*.bias', 'weight_decay': 0.0}}, got {group!r:.80}"
        )
    return group


def _plain(options: Mapping[str, Any], *, without: str = "") -> dict[str, Any]:
    return {name: plain(value) for name, value in options.items() if name != without}


def plain(value: Any) -> Any:
    """Return a number, or a list of them, as Python's own."""
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return value.item() if hasattr(value, "item") else value
