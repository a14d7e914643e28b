"""The per-sample page's arithmetic, on made-up measurements and on one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.per_sample.report import per_sample_section, verdicts
from benchmarks.per_sample.times import DENSE, OTHERS, WARM, Measured, measure
from benchmarks.per_sample.workloads import WORKLOADS

BASE_S = 0.5


def measured(
    dense: Sequence[float] = (1.8, 1.8, 1.8),
    *,
    three_shards: float = 6.0,
    vmap: float = 6.0,
    factored_bytes: int = 10,
    first_s: float = 1.5,
) -> Measured:
    found = Measured(workload="W2 B=2", heap=WARM)
    for ratio in dense:
        for seconds, first in (
            ({"dense": ratio}, {"dense": [first_s, 1.0]}),
            ({"factors": 2.0, "factors, three shards": three_shards}, {}),
            ({"vmap": vmap}, {}),
            ({"loop": 9.0}, {"loop": [1.6, 1.6]}),
        ):
            of_process = {name: r * BASE_S for name, r in seconds.items()}
            found.add(
                {
                    "seconds": {"base": BASE_S, "forward": BASE_S / 5, **of_process},
                    "first_calls_s": first,
                    "absent": {"Opacus": "ValueError: no"},
                    "dense_bytes": 1500,
                    "factored_bytes": factored_bytes,
                    "copied_bytes_per_s": 3000.0,
                }
            )
    return found


def test_the_floor_is_the_base_and_the_bytes_of_the_result() -> None:
    assert measured().floor == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (measured(), 0),
        (measured(three_shards=8.2), 1),
        (measured(factored_bytes=11), 1),
        (measured(vmap=1.6), 1),
        (measured([1.8, 1.8, 6.1]), 1),  # in one run of three
        (measured(first_s=1.95), 2),
    ],
)
def test_a_bar_that_is_missed_is_said(found: Measured, missed: int) -> None:
    lines = verdicts([found])
    assert len(lines) == 5
    assert sum(line.startswith("**not met**") for line in lines) == missed


def test_the_page_names_who_gave_nothing_and_why() -> None:
    page = per_sample_section([measured()])
    assert "W2 B=2: Opacus gives nothing: ValueError: no" in page
    assert "| W2 B=2 warm | 500.00 | 1.8 |" in page


@pytest.mark.parametrize("methods", [DENSE, OTHERS, "loop", "vmap", "ExpandedWeights"])
def test_a_process_measures_its_methods_and_nobody_elses(methods: str) -> None:
    told = measure(WORKLOADS["W2 B=2"](), methods, rounds_s=0)
    assert not told["absent"]
    timed = set(told["seconds"]) - {"base", "forward"}
    assert timed == set(told["first_calls_s"])
    assert ("dense" in timed) == (methods == DENSE)
    assert ("factored_bytes" in told) == (methods == OTHERS)
