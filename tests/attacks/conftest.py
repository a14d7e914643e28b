"""One box for all attacks that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.__main__ import MODELS
from tests.attacks.target import Target, own_box


@pytest.fixture(scope="session")
def shared() -> Iterator[Target]:
    with own_box(models=MODELS) as target:
        yield target
