"""One box on a cluster of two CPU devices, shared by the tests of this folder."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.boxes import TestBox, running_box
from tests.client.conftest import write_models
from tests.cluster.processes import having

# Which of the machine's processes are the box's: every one inherits it.
VARIABLE = "GRADBOX_TESTS_CLUSTER"


@dataclass(frozen=True)
class ClusterBox:
    """A box on a cluster, and what tells its processes from others."""

    box: TestBox
    mark: str
    models: Path

    def processes(self) -> list[int]:
        """Return its living processes."""
        return having(VARIABLE, self.mark)

    def process_of(self, device: str | None) -> int:
        """Return the process that a device had last, as the head's log says."""
        assert self.box.data is not None
        said = (self.box.data / "logs" / "cluster.log").read_text()
        found = re.findall(rf"device {device} is ready .* in process (\d+)", said)
        return int(found[-1])


def write_cluster_models(path: Path) -> Path:
    """Write a models file with the problem table's models, and some that test devices."""
    write_models(path)
    here = Path(__file__).parent / "models.py"
    entries = [
        f'[models.{name}]\nbuilder = "python"\nsource = "{here}:{name}"\n'
        for name in ("unhurried", "unhurried_mean", "running_mean", "masked_mean", "hooking")
    ]
    path.write_text(path.read_text() + "\n" + "\n".join(entries))
    return path


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterBox]:
    folder = tmp_path_factory.mktemp("cluster")
    models = write_cluster_models(folder / "models.toml")
    mark = uuid.uuid4().hex
    arguments = ("--cluster", "local", "--device", "cpu,cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, mark)
        patch.setenv("GRADBOX_CHECKPOINT_AFTER_S", "0.2")
        with running_box(folder / "data", models=models, arguments=arguments) as box:
            yield ClusterBox(box, mark, models)
