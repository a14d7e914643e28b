"""Every test process computes on one thread, draws the same inputs, and never asks a model hub."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.scheduling import ByBox, turn

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of whatever the tests start
torch.set_num_threads(1)

# The same inputs on every machine, however slow it is.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by `turn`; within a turn, pytest's order stays."""
    items.sort(key=lambda item: turn(item.nodeid))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection, a full one of which takes 0.2 s."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the files that share boxes in one process, where files are kept together at all."""
    if config.getvalue("dist") != "loadfile":
        return None
    return ByBox(config, log)
