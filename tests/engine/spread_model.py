"""Models over the CPU and a pretended device: `python -m tests.engine.spread_model`.

Prints, as JSON, for each case and each order of the devices how far the answers are from those of
the model on the CPU alone, or what was raised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from torch import nn

from gradbox_engine import EngineError
from tests.engine.pretended_device import CPU, PRETENDED
from tests.engine.spread_cases import CASES, Answer, apart, gradient, spread, whole


def compared(case: Callable[[nn.Module], Answer], model: nn.Module) -> float | str:
    """Return the largest difference of a case's answers, or what was raised."""
    expected = case(whole())
    try:
        found = case(model)
    except (EngineError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    if found.keys() != expected.keys():
        return f"expected {sorted(expected)}, got {sorted(found)}"
    return max(float((found[name].cpu() - x).abs().max()) for name, x in expected.items())


def main() -> None:
    orders = {"pretended, cpu": (PRETENDED, CPU), "cpu, pretended": (CPU, PRETENDED)}
    answers = {
        f"{name} on {order}": compared(case, spread(*devices))
        for order, devices in orders.items()
        for name, case in CASES.items()
    }
    answers["not moved"] = compared(gradient, apart(PRETENDED, CPU))
    print(json.dumps(answers), flush=True)
    os._exit(0)  # torch's thread of the pretended device does not end


if __name__ == "__main__":
    main()
