"""A box on a cluster of three machines, one of which is lost."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import save_file

from gradbox import GradClient, Gradient
from tests.boxes import ROOT, Up, running_box
from tests.cluster import models
from tests.cluster.conftest import VARIABLE, ClusterBox, write_cluster_models
from tests.cluster.processes import wait_until
from tests.cluster.test_failures import long_job, when_in
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares
from tests.cluster.test_samples import SIZES, assert_alike, normal, per_sample, tensors
from tests.oracle import TOLERANCE, difference

# Three raylets and their devices take half a minute to start.
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Nodes:
    """The nodes of the cluster, its address, and the folder for their temporary files."""

    address: str
    process: subprocess.Popen[str]
    temporary: Path

    def order(self, what: str) -> None:
        """See `tests.cluster.nodes`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "done"


def models_in_a_folder(folder: Path) -> Path:
    """Write the models file with what it names beside it."""
    folder.mkdir()
    path = write_cluster_models(folder / "models.toml")
    source = Path(models.__file__)
    shutil.copy(source, folder)
    path.write_text(
        path.read_text().replace(str(source), source.name)
        + f'[models.weighted]\nbuilder = "python"\nsource = "{source.name}:weighted"\n'
        'weights = "weighted.safetensors"\n'
    )
    weights = {"weight": normal(3, 5), "bias": normal(3)}
    save_file(weights, folder / "weighted.safetensors")
    return path


@contextmanager
def running_nodes(number: int, *, mark: str) -> Iterator[Nodes]:
    """Run a cluster of nodes with a core each; what is started meanwhile finds its token."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="gr-") as ray_folder,
    ):
        patch.setenv(VARIABLE, mark)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.nodes", ray_folder, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("127.0.0.1:")).strip()
        try:
            yield Nodes(address, process, Path(ray_folder))
        finally:
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def nodes_and_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, ClusterBox]]:
    folder, mark = tmp_path_factory.mktemp("nodes"), uuid.uuid4().hex
    file = models_in_a_folder(folder / "models")
    with running_nodes(3, mark=mark) as nodes:
        arguments = ("--cluster", nodes.address, "--device", "cpu")
        with running_box(folder / "data", models=file, arguments=arguments) as box:
            yield nodes, ClusterBox(box, mark, file)


@pytest.fixture(scope="module")
def client(nodes_and_box: tuple[Nodes, ClusterBox]) -> Iterator[GradClient]:
    with nodes_and_box[1].box.client() as client:
        yield client


def test_a_second_box_on_a_cluster_says_what_it_waits_for(
    nodes_and_box: tuple[Nodes, ClusterBox], tmp_path: Path
) -> None:
    nodes, cluster = nodes_and_box
    arguments = ["--models", str(cluster.models), "--port", "0", "--device", "cpu"]
    up = Up(tmp_path / "data", *arguments, "--cluster", nodes.address)
    for line in up._output:
        if "not ready yet" in line and "another box or program has the rest" in line:
            break
    code, said = up.stop()
    assert code == 0
    assert "0 device" not in said


def test_rows_of_other_machines_come_in_blocks_through_the_object_store(
    client: GradClient, tmp_path: Path
) -> None:
    """Only the device of the box's own machine writes to the result file itself."""
    expected = client.submit(per_sample(form="dense", devices=1)).result(WAIT_S)
    result = client.submit(per_sample(form="dense", devices=3)).result(WAIT_S)
    assert len(result.manifest.ranges or ()) == 3
    assert_alike(tensors(result, tmp_path), tensors(expected, tmp_path))
    samples = [sum(SIZES[run.start : run.stop]) for run in result.manifest.ranges or ()]
    row_bytes = result.flat().shape[1] * 8
    moved = (result.manifest.bytes_moved or {})["rows"]
    assert moved in {(sum(samples) - own) * row_bytes for own in samples}
    rounded = client.submit(per_sample(form="dense", transfer="bf16", devices=3)).result(WAIT_S)
    assert (rounded.manifest.bytes_moved or {})["rows"] in {
        (sum(samples) - own) * row_bytes // 4 for own in samples
    }
    assert rounded.manifest.transfer_error == pytest.approx(2**-8)


def test_a_machine_that_is_lost_costs_its_range_alone_and_one_that_joins_serves(
    nodes_and_box: tuple[Nodes, ClusterBox], client: GradClient
) -> None:
    nodes, _ = nodes_and_box
    expected = client.submit(long_job(devices=1)).result(WAIT_S)
    assert num_ranges(client) == 3
    job = client.submit(long_job(devices="auto"))
    when_in("replay", job)
    nodes.order("kill")
    result = job.result(WAIT_S)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert sum(found.devices_lost for found in result.manifest.ranges or ()) == 1
    assert result.manifest.attempts == 1
    wait_until(lambda: num_ranges(client) == 2, what="the device to be forgotten")
    nodes.order("join")
    wait_until(lambda: num_ranges(client) == 3, what="the device of the new machine")


@pytest.mark.skipif(os.geteuid() != 0, reason="hides a folder from a process, which wants root")
def test_a_machine_without_the_models_files_gets_them_from_the_head(
    nodes_and_box: tuple[Nodes, ClusterBox], client: GradClient
) -> None:
    nodes, cluster = nodes_and_box
    before = num_ranges(client)
    nodes.order(f"join without {cluster.models.parent}")
    wait_until(lambda: num_ranges(client) == before + 1, what="the device of the machine")
    fetched = nodes.temporary / f"gradbox-models-{os.getuid()}" / "weighted"
    assert {path.name for path in fetched.iterdir()} == {"models.py", "weighted.safetensors"}

    def job(devices: object) -> Gradient:
        return Gradient(
            model="weighted",
            inputs=shards(8),
            loss=sum_of_squares,
            devices=devices,  # type: ignore[arg-type]
        )

    every, one = (client.submit(job(n)).result(WAIT_S) for n in ("auto", 1))
    assert len(every.manifest.ranges or ()) == before + 1
    assert difference(every.grads, one.grads) <= TOLERANCE
