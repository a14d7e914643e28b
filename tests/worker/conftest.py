"""One box with one worker, shared by the tests of this folder that do not set up their own.

To start a worker takes seconds of processor time, most of it for importing torch. The shared one
is patient about its lease, so that no busy machine ends it, and impatient about all else. It is
killed and stopped by whoever wants to, and started again for the next test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running_box, running_worker

NUM_AFFINE = 16
# What tests leave beside `zoo.Misbehaving`, apart from orders; see there.
LEFT = ("hold", "calls", "children")


@pytest.fixture(scope="package")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A box with the models "m" (`zoo.Misbehaving`), and "m0" to "m15"."""
    with running_box(tmp_path_factory.mktemp("box")) as box:
        box.models_file.write_text(
            f'[models.m]\nbuilder = "python"\nsource = "{zoo.__file__}:misbehaving"\n'
            f'kwargs = {{folder = "{box.folder}"}}\n'
            + "".join(
                f'[models.m{index}]\nbuilder = "python"\nsource = "{zoo.__file__}:affine"\n'
                for index in range(NUM_AFFINE)
            )
        )
        yield box


@pytest.fixture(scope="package")
def living_worker(box: Box) -> Iterator[Callable[[], WorkerProcess]]:
    """Gives a worker that is idle: the same one again as long as it lives."""
    options = ["--lease-s", "600", "--cancel-grace-s", "1.5", "--checkpoint-after-s", "0"]
    options += ["--job-memory-gib", "0.5", "--device-log", str(box.folder / "logs" / "device.log")]
    with ExitStack() as stack:
        started: list[WorkerProcess] = []

        def living() -> WorkerProcess:
            if not started or started[-1].process.poll() is not None:
                started.append(stack.enter_context(running_worker(box, *options)))
            started[-1].wait_until_ready()
            return started[-1]

        yield living


@pytest.fixture
def worker(box: Box, living_worker: Callable[[], WorkerProcess]) -> Iterator[WorkerProcess]:
    """The shared worker, idle, with models that behave; they do so again behind the test."""
    yield living_worker()
    for name in ("order", *LEFT):
        (box.folder / name).unlink(missing_ok=True)
