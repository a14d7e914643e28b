"""A change that means to move code alone does not move a digit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import on_cpu_alone
from tests.golden.results import digest, kept, machine, problems

KEPT = kept()
PROBLEMS = problems()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_problem_has_a_digest() -> None:
    assert KEPT["digests"].keys() == PROBLEMS.keys()


@on_cpu_alone
@pytest.mark.skipif(
    machine() != KEPT["machine"],
    reason=f"digests are of {KEPT['machine']}, and this is {machine()}: last digits may differ",
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_have_the_digits_that_were_kept(name: str) -> None:
    assert digest(PROBLEMS[name]()) == KEPT["digests"][name]


def test_a_digest_tells_the_last_bit() -> None:
    x = torch.ones(3, dtype=torch.float64)
    moved = x.clone()
    moved[1] = torch.nextafter(x[1], x[1] * 2)
    assert digest({"x": x}) != digest({"x": moved})
    assert digest({"x": x}) != digest({"y": x})
