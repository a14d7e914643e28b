"""What torch's own database of operators calls is what a graph computes, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLOW = pytest.param(40, ["float64", "complex128"], 12_000, marks=pytest.mark.slow)


@pytest.mark.parametrize(("num_calls", "dtypes", "least"), [(1, ["float64"], 700), SLOW])
def test_calls_of_torchs_operators_are_exact_or_refused(
    num_calls: int, dtypes: list[str], least: int
) -> None:
    program = (
        f"import tests.graphs.operator_database as database; database.main({num_calls}, {dtypes})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["counts"]["agrees"] > least
