"""`python -m proofs.containers`: build, start what compose describes, run one job from outside."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys

from proofs.containers.buildah import Buildah
from proofs.containers.docker import Docker
from proofs.containers.first_job import largest_difference, wait_until_ready

TOLERANCE = 1e-6  # float32, gradients of order 1 to 10 over 8 samples


def main() -> int:
    """Return 0 if the job's gradients are autograd's, 1 if not, 2 if nothing here builds images."""
    parser = argparse.ArgumentParser(prog="python -m proofs.containers", description=__doc__)
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"), default=available())
    parser.add_argument("--built", action="store_true", help="take the images as they are")
    args = parser.parse_args()
    if args.engine is None:
        print(
            "needs docker or podman, or as root: apt install buildah debootstrap", file=sys.stderr
        )
        return 2
    containers = Buildah() if args.engine == "buildah" else Docker(args.engine)
    if not args.built:
        containers.build()
    if args.engine == "buildah" and "GRADBOX_PRIVATE_NETWORK" not in os.environ:
        containers.stop()  # its folder; the process in the private network makes its own
        return _again_in_a_private_network()
    try:
        containers.start()
        wait_until_ready()
        made = containers.execute("service", ["gradbox", "tokens", "create", "ada", "--json"])
        difference = largest_difference(json.loads(made)["token"])
    except Exception:
        print(containers.logs(), file=sys.stderr)
        raise
    finally:
        containers.stop()
    print(f"{args.engine}: one job from outside, largest difference from autograd {difference:.1e}")
    return 0 if difference <= TOLERANCE else 1


def available() -> str | None:
    """Return the first container engine that works here: docker, podman, then buildah."""
    for engine in ("docker", "podman"):
        if (
            shutil.which(engine)
            and not subprocess.run([engine, "info"], capture_output=True).returncode
        ):
            return engine
    if os.geteuid() == 0 and shutil.which("buildah") and shutil.which("debootstrap"):
        return "buildah"
    return None


def _again_in_a_private_network() -> int:
    """Run this again where nothing else is on the network, so that every port is free."""
    command = (
        f"ip link set lo up && exec {sys.executable} -m proofs.containers --engine buildah --built"
    )
    return subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        env={**os.environ, "GRADBOX_PRIVATE_NETWORK": "1"},
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
