"""docs/cli.md says what the commands say, and `gradbox --help` is there at once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gradbox.cli.commands import entries
from tests.house.cli_reference import BEGIN, PAGE, reference

HELP_S = 0.3


def test_the_page_holds_the_reference_that_the_commands_make() -> None:
    _, _, written = PAGE.read_text().partition(BEGIN)
    assert written.strip() == reference().strip(), "python -m tests.house.cli_reference"


def test_every_command_is_in_a_table() -> None:
    text = PAGE.read_text()
    assert not [name for name in entries() if f"| `gradbox {name}" not in text]


@pytest.mark.slow  # a time, which other work on the machine would falsify
def test_the_help_is_there_within_a_third_of_a_second() -> None:
    def run() -> float:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "gradbox", "--help"], stdout=subprocess.DEVNULL, check=True
        )
        return time.perf_counter() - began

    assert min(run() for _ in range(10)) <= HELP_S
