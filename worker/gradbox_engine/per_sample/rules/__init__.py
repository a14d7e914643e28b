"""The rules: what a layer's parameters get from the layer's input and its output's gradient.

`rule` says what a rule is; then one file a kind of layer: `linear`, `convolution`, `embedding`,
`normalisation`. `RULES` finds a rule by the function that
a layer calls, not by the layer's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradbox_engine.per_sample.rules import convolution, embedding, linear, normalisation
from gradbox_engine.per_sample.rules.rule import Rule

RULES: dict[Callable[..., Any], Rule] = {
    **linear.RULES,
    **embedding.RULES,
    **convolution.RULES,
    **normalisation.RULES,
}
