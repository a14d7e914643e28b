"""A change that means to move code alone does not move a digit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from tests.device import on_cpu_alone
from tests.golden.results import (
    NEAR,
    SKETCHES,
    apart,
    digest,
    draws,
    kept,
    machine,
    problems,
    sketch,
)

KEPT = kept()
SKETCHED = json.loads(SKETCHES.read_text())
PROBLEMS = problems()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_problem_has_a_digest() -> None:
    assert KEPT["digests"].keys() == PROBLEMS.keys()


def test_every_problem_has_a_sketch() -> None:
    assert SKETCHED.keys() == PROBLEMS.keys()


@on_cpu_alone
@pytest.mark.skipif(
    draws() != KEPT["draws"],
    reason=f"torch draws other weights, data and masks here than on {KEPT['machine']}",
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_have_the_digits_that_were_kept(name: str) -> None:
    """To the last one on the processor that they were made on, else to eleven."""
    found = PROBLEMS[name]()
    if machine() == KEPT["machine"]:
        assert digest(found) == KEPT["digests"][name]
    assert apart(sketch(found), SKETCHED[name]) <= NEAR


def test_a_digest_tells_the_last_bit() -> None:
    x = torch.ones(3, dtype=torch.float64)
    moved = x.clone()
    moved[1] = torch.nextafter(x[1], x[1] * 2)
    assert digest({"x": x}) != digest({"x": moved})
    assert digest({"x": x}) != digest({"y": x})


def test_a_sketch_tells_what_is_lost_or_changed() -> None:
    x = torch.linspace(1, 2, 50, dtype=torch.float64)
    small = x / 1e6
    expected = sketch({"x": x, "small": small})
    assert apart(sketch({"x": x * (1 + 1e-14), "small": small}), expected) <= NEAR
    assert apart(sketch({"x": x, "small": small * (1 + 1e-10)}), expected) <= NEAR
    for other in (x * (1 + 1e-10), x.flip(0), -x, x[:-1]):
        assert apart(sketch({"x": other, "small": small}), expected) > NEAR
    assert apart(sketch({"x": x}), expected) > NEAR
