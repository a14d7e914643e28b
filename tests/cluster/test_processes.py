"""The processes of a box on a cluster: what they listen on, and that none outlives the box."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gradbox_worker.cluster.ray_session import join
from gradbox_worker.errors import DeviceNotStarted
from tests.boxes import Up
from tests.cluster.conftest import VARIABLE, ClusterBox, write_cluster_models
from tests.cluster.processes import commands, having, wait_until

LISTENING = "0A"


def listened_on(pids: list[int]) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of the TCP sockets on which these processes listen."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as /proc/net has it: words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


def test_a_cluster_on_one_machine_listens_on_loopback_alone(cluster: ClusterBox) -> None:
    found = listened_on(cluster.processes())
    assert found
    assert all(address.is_loopback for address in found), found


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    models = write_cluster_models(tmp_path / "models.toml")
    arguments = ["--models", str(models), "--port", "0", "--device", "cpu"]
    code, said = Up(tmp_path / "data", *arguments, "--cluster", "127.0.0.1:1").finish()
    assert code == 2
    assert "expected" in said.splitlines()[-1]
    assert "127.0.0.1:1" in said.splitlines()[-1]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1"])
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    with pytest.raises(DeviceNotStarted, match=f"expected .*{address}"):
        join(address)


def test_workers_of_a_box_on_a_cluster_are_refused_by_name(tmp_path: Path) -> None:
    models = write_cluster_models(tmp_path / "models.toml")
    arguments = ["--models", str(models), "--cluster", "local", "--workers", "2"]
    code, said = Up(tmp_path / "data", *arguments).finish()
    assert code == 2
    assert "--workers or --cluster" in said.splitlines()[-1]


@pytest.mark.slow  # starts a box of its own
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    models = write_cluster_models(tmp_path / "models.toml")
    arguments = ["--models", str(models), "--port", "0", "--device", "cpu"]
    up = Up(tmp_path / "data", *arguments, "--cluster", "local")
    up.wait_ready()
    assert len(having(VARIABLE, mark)) > 5
    up.process.send_signal(number)
    up.process.wait()
    monkeypatch.delenv(VARIABLE)
    wait_until(lambda: not having(VARIABLE, mark), what="its processes to end")
    up._output.close()


def test_a_box_has_a_process_for_each_device_and_three_beside_redis(cluster: ClusterBox) -> None:
    """`up`, the service and the head; Ray's own, and the head's guardian, aside."""
    found = [commands()[pid] for pid in cluster.processes()]
    own = [one for one in found if "-m gradbox" in one or "ray::DeviceActor" in one]
    own = [one for one in own if "descendants" not in one]
    assert len(own) == 2 + 3, own


def test_the_head_imports_no_torch() -> None:
    """It computes nothing, and a box starts sooner without."""
    code = (
        "import sys, gradbox_worker.cluster.taking, gradbox_worker.cluster.__main__; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
