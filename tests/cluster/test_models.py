"""The models of a cluster's devices: read again when that is asked for, and alike on all."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gradbox import GradClient, Gradient
from gradbox.errors import UnknownModel
from gradbox.protocol import OperationMode, OperationView
from gradbox_service.database.connection import connect
from gradbox_service.fleet.operation import Operation
from gradbox_service.jobs import Records
from gradbox_service.up.embedded_redis import url_in
from gradbox_worker.cluster.machines import ModelVersions
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares

LATER = """
from torch import nn
from tests.case_models import seeded

@seeded
def later():
    return nn.Linear(5, {width})
"""


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        yield client


def write_later(models: Path, *, width: int) -> None:
    (models.parent / "later.py").write_text(LATER.format(width=width))


@pytest.mark.slow  # the devices build all their models again
def test_a_reload_has_every_device_build_what_the_models_file_names_now(
    cluster: ClusterBox, client: GradClient
) -> None:
    write_later(cluster.models, width=2)
    entry = '\n[models.later]\nbuilder = "python"\nsource = "later.py:later"\n'
    cluster.models.write_text(cluster.models.read_text() + entry)
    for width in (2, 4):  # a new model, and then a file of it that has changed
        write_later(cluster.models, width=width)
        found = client.reload_models(timeout_s=WAIT_S)
        assert not found.reloading
        assert not found.errors
        job = Gradient(model="later", inputs=shards(4), loss=sum_of_squares, devices=2)
        result = client.submit(job).result(WAIT_S)
        assert result.grads["bias"].shape == (width,)
        assert len(result.manifest.ranges or ()) == 2
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def test_a_job_in_ranges_is_refused_where_its_model_has_another_version_by_now(
    cluster: ClusterBox, client: GradClient
) -> None:
    assert cluster.box.data is not None
    with closing(connect(url_in(cluster.box.data / "redis"))) as connection:
        records, operation = Records(connection), Operation(connection)
        operation.set(OperationView(mode=OperationMode.PAUSED))
        records.wake()
        try:
            job = client.submit(
                Gradient(model="mlp", inputs=shards(4), loss=sum_of_squares, devices=2)
            )
            records.update(job.id, lambda record: replace(record, model_version="0" * 64))
        finally:
            operation.set(OperationView())
            records.wake()
    with pytest.raises(UnknownModel, match="0000"):
        job.result(WAIT_S)


def problem(versions: ModelVersions, device: str, software: str, **models: str) -> str:
    """Say of a device with these versions of models, "" where it has none, why it is refused."""
    usable = {name: version for name, version in models.items() if version}
    unusable = dict.fromkeys(models.keys() - usable.keys(), "no such file")
    return versions.problem(device, usable, unusable=unusable, software=software)


SAME = "gradbox 0.1.0, torch 2.13.0"


def test_a_device_of_another_version_is_refused_with_both_digests() -> None:
    versions = ModelVersions()
    assert problem(versions, "a/cpu-0", SAME, net="1234", other="") == ""
    assert problem(versions, "b/cpu-0", SAME, net="1234", other="99") == ""
    refused = problem(versions, "c/cpu-0", SAME, net="5678", other="")
    assert "1234" in refused
    assert "5678" in refused
    assert "c/cpu-0" in refused


def test_a_device_that_cannot_build_what_the_first_one_can_is_refused() -> None:
    versions = ModelVersions()
    problem(versions, "a/cpu-0", SAME, net="1234")
    assert "no such file" in problem(versions, "b/cpu-0", SAME, net="")


def test_a_device_with_another_torch_is_refused_with_both_versions() -> None:
    versions = ModelVersions()
    assert problem(versions, "a/cpu-0", SAME, net="1234") == ""
    other = "gradbox 0.1.0, torch 2.11.0"
    refused = problem(versions, "b/cpu-0", other, net="1234")
    assert "b/cpu-0" in refused
    assert SAME in refused
    assert other in refused
