"""Which test file runs when, and in which of several processes.

A box takes seconds to start. Files that share boxes therefore run in one process, which begins with
them, since they take longest. Files whose tests compute by themselves come last: they are many and
short, and so the processes end at about the same time.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadFileScheduling

SHARING: Final = ("tests/client/", "tests/cluster/", "tests/dashboard/", "tests/worker/")
# Files of these folders that take seconds without the shared boxes.
SHARING_NONE: Final = (
    *(
        f"tests/client/test_{name}.py"
        for name in (
            "backup estimates factor_checks fuzz_bytes hits models_page problems public_names "
            "results training_under_quota up wire_faults"
        ).split()
    ),
    *(
        f"tests/worker/{name}.py"
        for name in (
            "runs/test_adapters runs/test_recovery runs/test_steps test_drawn_interruptions "
            "test_first_job test_hugging_face test_refusing_redis test_registry test_reload "
            "test_short_of_memory"
        ).split()
    ),
)
COMPUTING: Final = ("tests/engine/", "tests/golden/", "tests/graphs/")


def unit(nodeid: str) -> str:
    """Return what runs in one process: a file, or a folder whose files share boxes."""
    file = nodeid.partition("::")[0]
    if file in SHARING_NONE:
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
