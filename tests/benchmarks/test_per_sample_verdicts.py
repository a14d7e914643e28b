"""The per-sample page's arithmetic, on made-up measurements."""

from __future__ import annotations

import pytest

from benchmarks.per_sample import WARM, Measured
from benchmarks.per_sample_report import per_sample_section, verdicts


def measured(
    dense_s: float, *, factors_s: float = 1.0, vmap_s: float = 3.0, factored_bytes: int = 10
) -> Measured:
    return Measured(
        workload="W2 B=2",
        heap=WARM,
        seconds={
            "base": 0.5,
            "dense": dense_s,
            "factors": 1.0,
            "factors, three shards": 2 * factors_s + 1.0,
            "vmap": vmap_s,
        },
        absent={"Opacus": "ValueError: no"},
        dense_bytes=1500,
        factored_bytes=factored_bytes,
        copied_bytes_per_s=3000.0,
    )


def test_the_floor_is_the_base_and_the_bytes_of_the_result() -> None:
    assert measured(1.0).floor == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (measured(0.9), 0),
        (measured(0.9, factors_s=1.6), 1),
        (measured(0.9, factored_bytes=11), 1),
        (measured(0.9, vmap_s=0.8), 1),
    ],
)
def test_a_bar_that_is_missed_is_said(found: Measured, missed: int) -> None:
    lines = verdicts([found])
    assert len(lines) == 3
    assert sum(line.startswith("**not met**") for line in lines) == missed


def test_the_page_names_who_gave_nothing_and_why() -> None:
    page = per_sample_section([measured(0.9)])
    assert "W2 B=2: Opacus gives nothing: ValueError: no" in page
    assert "| W2 B=2 warm | 500.00 | 1.8 |" in page
