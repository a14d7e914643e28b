"""The files under deploy/ that no test starts are at least what their programs read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.boxes import ROOT

SYSTEMD = ROOT / "deploy" / "systemd"
NGINX = ROOT / "deploy" / "proxies" / "nginx.conf"
CADDY = ROOT / "deploy" / "proxies" / "Caddyfile"
SLURM = ROOT / "deploy" / "slurm" / "gradbox.sbatch"
SLURM_CLUSTER = ROOT / "deploy" / "slurm" / "gradbox-cluster.sbatch"
# What a box needs of a proxy before it: bodies of any size, passed on as they come; answers neither
# buffered nor compressed, and waited for; and, of nginx, the headers that Caddy sends by itself.
NGINX_NEEDS = """
proxy_set_header Host $http_host;
proxy_set_header X-Forwarded-Proto $scheme;
client_max_body_size 0;
proxy_request_buffering off;
proxy_buffering off;
gzip off;
proxy_read_timeout 120s;
"""
CADDY_NEEDS = "flush_interval -1"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="takes systemd-analyze")
def test_systemd_reads_the_units(tmp_path: Path) -> None:
    for unit in SYSTEMD.iterdir():
        # The program is where the page installs it, which is not here.
        text = re.sub(
            r"^(ExecStart=)/opt/gradbox/bin/gradbox",
            rf"\1{sys.executable}",
            unit.read_text(),
            flags=re.M,
        )
        (tmp_path / unit.name).write_text(text)
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "gradbox" in line]
    assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.parametrize("script", [SLURM, SLURM_CLUSTER], ids=lambda path: path.name)
def test_bash_reads_the_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


# Runs a step on this machine.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.slow  # starts a box of its own, and two nodes of Ray
@pytest.mark.parametrize("script", [SLURM, SLURM_CLUSTER], ids=lambda path: path.name)
def test_the_slurm_script_runs_a_program_against_its_box(tmp_path: Path, script: Path) -> None:
    (tmp_path / "models.toml").write_text(
        '[models.m]\nbuilder = "python"\nsource = "tests.case_models:mlp"\n'
    )
    program = tmp_path / "a program.py"
    program.write_text(
        "from gradbox import GradClient\n"
        "assert [model.name for model in GradClient().models()] == ['m']\n"
        "raise SystemExit(7)\n"
    )
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o700)
    here = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "SLURM_JOB_NUM_NODES": "2",
        "RAY_TMPDIR": "/tmp",  # short, for sockets lie there
        "PYTHONPATH": ":".join(filter(None, [str(ROOT), *sys.path])),
        "GRADBOX_MODELS": str(tmp_path / "models.toml"),
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(script), str(program)], env=here, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 7, done.stderr
    if script == SLURM_CLUSTER:
        assert "the cluster has 2 device(s)" in done.stderr, done.stderr
    assert not list(tmp_path.glob("gradbox-*"))


def test_up_has_the_options_that_units_and_scripts_give() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "gradbox", "up", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    for path in (SYSTEMD / "gradbox.service", SLURM):
        (line,) = re.findall(r"^(?:ExecStart=\S+|gradbox) up (.*)$", path.read_text(), re.M)
        for option in re.findall(r"(?<!\S)--[\w-]+", line):
            assert option in helped, f"{path.name}: {option}"


def statements(text: str) -> set[tuple[str, ...]]:
    """Return the statements of a configuration in nginx's or Caddy's form, each as its words.

    Raises:
        AssertionError: a block is not closed.
    """
    found, depth = set(), 0
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        depth += line.endswith("{") - (line == "}")
        assert depth >= 0, line
        found.add(tuple(line.rstrip("{;").split()))
    assert depth == 0
    return found


@pytest.mark.parametrize(("path", "needed"), [(NGINX, NGINX_NEEDS), (CADDY, CADDY_NEEDS)])
def test_a_proxys_file_says_what_the_box_needs(path: Path, needed: str) -> None:
    assert statements(needed) <= statements(path.read_text())


@pytest.mark.skipif(shutil.which("nginx") is None, reason="takes nginx")
def test_nginx_reads_its_file(tmp_path: Path) -> None:
    # Without the certificate, which only the proxy's machine has.
    site = NGINX.read_text().replace("443 ssl", "8443")
    site = re.sub(r"^\s*ssl_.*$", "", site, flags=re.M)
    conf = tmp_path / "nginx.conf"
    conf.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{site}\n}}\n")
    subprocess.run(["nginx", "-t", "-c", str(conf)], check=True)


@pytest.mark.skipif(shutil.which("caddy") is None, reason="takes caddy")
def test_caddy_reads_its_file() -> None:
    command = ["caddy", "validate", "--adapter", "caddyfile", "--config", str(CADDY)]
    subprocess.run(command, check=True)
