"""What the service says of the built-in losses."""

from __future__ import annotations

from gradbox.protocol.views import View


class LossTensor(View):
    """A tensor that a loss takes, in the order of its arguments."""

    name: str
    shape: str
    required: bool = True


class LossOption(View):
    """A Python value that changes what a loss computes.

    A number is greater than `above` or at least `at_least`; a string is one of `choices`.
    """

    name: str
    meaning: str
    default: float | str
    above: float | None = None
    at_least: float | None = None
    choices: list[str] = []


class LossView(View):
    """A loss that a job may name: `{"kind": "builtin", "name": …, "options": {…}}`."""

    name: str
    summary: str
    tensors: list[LossTensor]
    options: list[LossOption] = []


class LossList(View):
    """All built-in losses."""

    losses: list[LossView]
