"""The wheels that a machine with a CUDA torch lacks: collected here, installed without network.

    python -m proofs.cuda.wheels collect build/wheels                for Python 3.12 on Linux x86_64
    python -m proofs.cuda.wheels install build/wheels build/site      what this Python has not

`install` puts nothing into the environment that runs it, and leaves alone what is there: torch
stays the one that is installed. The folder that it fills belongs on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
EXTRAS: Final = ("service", "worker")
ALSO: Final = (
    "hatchling>=1.27",
    "hypothesis>=6.130",
    "pytest>=8.4",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
)
THERE: Final = frozenset({"torch", "gradbox"})  # torch is the machine's, gradbox the checkout
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def wanted() -> list[Requirement]:
    """Return what the box and its tests need beside torch, transformers and MiniLM's weights."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *ALSO, *(line for name in EXTRAS for line in extras[name])]
    return [r for r in map(Requirement, dict.fromkeys(lines)) if r.name not in THERE]


def collect(folder: Path, *, python: str) -> None:
    """Download the wheels with all that they need in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    abi = "cp" + python.replace(".", "")
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    options += [part for name in (abi, "abi3", "none") for part in ("--abi", name)]
    options += [part for name in PLATFORMS for part in ("--platform", name)]
    names = [str(requirement) for requirement in wanted()]
    _pip("download", "--quiet", *options, "--dest", str(folder), *names)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")


def install(folder: Path, target: Path) -> None:
    """Install into `target` the wheels that this Python lacks or has too old, and gradbox."""
    wheels = {canonicalize_name(w.name.partition("-")[0]): w for w in folder.glob("*.whl")}
    needs = [*wanted(), *(need for wheel in wheels.values() for need in _needs(wheel))]
    lacking = sorted(name for name in wheels if not _is_there(name, needs))
    target.mkdir(parents=True, exist_ok=True)
    quiet = ("--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(target))
    if lacking:
        _pip("install", *quiet, *(str(wheels[name]) for name in lacking))
    # For its metadata: the version, and the commands that the packages register.
    _pip("install", *quiet, "--no-build-isolation", str(ROOT), path=target)
    print(f"installed {', '.join(lacking) or 'nothing'} and gradbox in {target}")


def _needs(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _is_there(name: str, needs: Iterable[Requirement]) -> bool:
    """Return whether a package is installed, at a version that all of the requirements admit."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(
        need.specifier.contains(version, prereleases=True)
        for need in needs
        if canonicalize_name(need.name) == name
    )


def _pip(*arguments: str, path: Path | None = None) -> None:
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), env.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=env)


def main(arguments: list[str]) -> None:
    """Collect or install."""
    parser = argparse.ArgumentParser(prog="python -m proofs.cuda.wheels", description=__doc__)
    parser.add_argument("what", choices=["collect", "install"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=ROOT / "build" / "site")
    parser.add_argument("--python", default="3.12", help="whose wheels are collected [3.12]")
    told = parser.parse_args(arguments)
    if told.what == "collect":
        collect(told.folder, python=told.python)
    else:
        install(told.folder, told.target)


if __name__ == "__main__":
    main(sys.argv[1:])
