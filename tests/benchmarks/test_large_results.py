"""What the report of large results says of its bars."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.box.large_results import Beside, LargeResults, large_results_section
from benchmarks.box.small_jobs import Costs

FOUND = LargeResults(
    dense=Costs([9000.0, 8000.0, 30000.0], 3.0, 80.0, {"client": 900.0, "device": 5000.0}),
    dense_computation_s=3.0,
    dense_bytes=1_800 * 2**20,
    raw_s=2.0,
    auto_s=0.3,
    download=Beside(2**30, box_s=1.8, raw_s=1.5),
    upload=Beside(2**30, box_s=2.0, raw_s=1.5),
    output_bytes=2**30,
    grown_bytes=2**30,
    kept_bytes=0,
    load=0.5,
)


def test_what_is_met_and_what_is_not_is_said() -> None:
    assert "not met" not in large_results_section(FOUND)
    slow = replace(FOUND, raw_s=1.0, upload=Beside(2**30, box_s=3.0, raw_s=1.5))
    grown = replace(slow, grown_bytes=2**31, kept_bytes=2**29)
    assert large_results_section(slow).count("**not met**") == 2
    assert large_results_section(grown).count("**not met**") == 4


def test_the_median_of_dense_rows_stands_in_the_table() -> None:
    assert "| dense rows, submit to opened result | 1800 | 9.00 |  |" in large_results_section(
        FOUND
    )
