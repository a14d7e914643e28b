"""Which test file runs when, and in which of several processes.

A box takes seconds to start. Files that share boxes therefore run in one process, which begins with
them, since they take longest. Files whose tests compute by themselves come last: they are many and
short, and so the processes end at about the same time.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadFileScheduling

SHARING: Final = ("tests/client/", "tests/cluster/", "tests/dashboard/", "tests/worker/")
WITH_BOXES_OF_THEIR_OWN: Final = (
    "tests/client/test_up.py",
    "tests/client/test_models_page.py",
    "tests/client/test_training_under_quota.py",
)
COMPUTING: Final = ("tests/engine/", "tests/golden/", "tests/graphs/")


def unit(nodeid: str) -> str:
    """Return what runs in one process: a file, or a folder whose files share boxes."""
    file = nodeid.partition("::")[0]
    if file in WITH_BOXES_OF_THEIR_OWN:
        return file
    return next((folder for folder in SHARING if file.startswith(folder)), file)


def turn(nodeid: str) -> int:
    """Return 0 for a test that comes early, 1 for most, 2 for one that comes late."""
    if unit(nodeid) in SHARING:
        return 0
    return 2 if nodeid.startswith(COMPUTING) else 1


class ByBox(LoadFileScheduling):
    """Gives whole units to the processes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
