"""Every attack ends as its table says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proofs.attacks.__main__ import MODELS
from proofs.attacks.tables import ATTACKS, Attack
from proofs.attacks.target import NotHere, Target, own_box


@pytest.fixture(scope="module")
def shared() -> Iterator[Target]:
    """One box for all attacks that need none of their own."""
    with own_box(models=MODELS) as target:
        yield target


def _parameter(attack: Attack) -> Any:
    marks: list[Any] = [pytest.mark.slow] if attack.slow else []
    if attack.open is not None:
        # Strict: whoever adds the defence takes the mark away.
        marks.append(pytest.mark.xfail(strict=True, reason=attack.open, raises=AssertionError))
    return pytest.param(attack, marks=marks, id=attack.name)


@pytest.mark.parametrize("attack", [_parameter(attack) for attack in ATTACKS.values()])
def test_an_attack_ends_as_it_must(attack: Attack, shared: Target, tmp_path: Path) -> None:
    shared.folder = tmp_path
    try:
        attack.run(shared)
    except NotHere as error:
        pytest.skip(str(error))
