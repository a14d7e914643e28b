"""A device that died and came back, or has another job, does not have the ranges that it had.

Whoever asks for them is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradbox import Gradient, Jacobian
from gradbox.computations import Computation
from gradbox.protocol import ModelView
from gradbox_engine.ranges import Range, RangeCotangents
from gradbox_worker.cluster.device import ClusterDevice
from gradbox_worker.cluster.device_actor import DeviceActor
from gradbox_worker.device import DeviceSettings
from gradbox_worker.errors import JobStopped
from gradbox_worker.work import Work
from tests.client.conftest import write_models

SHARDS = [torch.zeros(2, 5, dtype=torch.float64)] * 2
FIRST = Range(0, 2, 0, 1)


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceActor]:
    folder = tmp_path_factory.mktemp("device")
    (folder / "mark").write_text("seen")
    settings = DeviceSettings(write_models(folder / "models.toml"), folder, device="cpu")
    actor = DeviceActor(settings, "here/cpu-0", (folder / "mark", "seen"), None)
    yield actor
    actor.device.empty()


@pytest.fixture(scope="module")
def device(actor: DeviceActor) -> ClusterDevice:
    return actor.device


def opened(device: ClusterDevice, computation: Computation) -> None:
    """Open a job of which another process of this device has run ranges."""
    views = [ModelView.model_validate_json(text) for text in device.describe()["models"]]
    work = Work(
        job_id="job",
        attempt=1,
        model="mlp",
        model_version={view.name: view for view in views}["mlp"].version,
        spec=computation.prepare().spec,
        spec_digest="",
        result_path=Path("job"),
        queued_s=0.0,
    )
    device.open(work, "", None)


IN_PHASES: dict[str, Callable[[ClusterDevice], Any]] = {
    "replay": lambda d: d.replay(FIRST, RangeCotangents(cotangents={}, needed=(), norms={})),
    "check": lambda d: d.check(FIRST, {}),
    "take_sums": lambda d: d.take_sums(0),
    "add": lambda d: d.add(0, {}),
}
OF_SAMPLES: dict[str, Callable[[ClusterDevice], Any]] = {
    "factors": lambda d: d.factors(0),
    "gram": lambda d: d.gram(0, None, False),
}


@pytest.mark.parametrize("name", IN_PHASES)
def test_a_range_of_a_process_that_died_is_told_as_lost(device: ClusterDevice, name: str) -> None:
    opened(device, Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum()))
    with pytest.raises(JobStopped):
        IN_PHASES[name](device)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_rows_of_a_process_that_died_are_told_as_lost(device: ClusterDevice, name: str) -> None:
    opened(device, Jacobian(model="mlp", inputs=SHARDS, reduce="gram"))
    with pytest.raises(JobStopped):
        OF_SAMPLES[name](device)


WITHOUT_A_JOB = {
    "import_for_jobs",
    "run",
    "read_result",
    "open",
    "empty",
    "drop_idle_graphs",
}
BESIDE_A_JOB = {
    "take_rows",
    "place_rows",
    "describe",
    "news",
    "progress",
    "holds",
    "stop",
    "stop_all",
}
FOR_A_JOB = {name for name in vars(DeviceActor) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(FOR_A_JOB - WITHOUT_A_JOB - BESIDE_A_JOB))
@pytest.mark.parametrize("job", [("other", 1), ("job", 0)], ids=["another job", "attempt"])
def test_a_call_for_a_job_that_is_not_open_there_is_refused(
    actor: DeviceActor, name: str, job: tuple[str, int]
) -> None:
    opened(actor.device, Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum()))
    with pytest.raises(JobStopped):
        getattr(actor, name)(job)
