"""`python -m gradbox_worker.cluster`: the head of a box's cluster, started by `gradbox up`.

It ends when it is told to, and with it all that Ray started here: in order, or, where it is killed
itself, by a guardian that kills what it leaves behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
import uuid
from pathlib import Path
from typing import Final

from gradbox.printable import log_to_stderr
from gradbox_worker.cluster.head.address_file import NAME
from gradbox_worker.cluster.head.ray_environment import reach, start_here
from gradbox_worker.device import DeviceSettings
from gradbox_worker.device.descendants import MARK, Guardian, end_descendants
from gradbox_worker.errors import WorkerError

log = logging.getLogger(__name__)

LOCAL: Final = "local"


def main(arguments: list[str]) -> int:
    """Run until told to stop.

    Returns:
        0 if it was told to stop, 2 if no device can be used.
    """
    options = _parser().parse_args(arguments)
    log_to_stderr("cluster[%(process)d] ")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    file = options.data / NAME
    file.unlink(missing_ok=True)  # what a head that was killed left
    mark = secrets.token_hex(16)
    guardian = Guardian(os.getpid(), mark)
    os.environ[MARK] = mark
    try:
        _run(options, file=file, stopping=stopping)
    except WorkerError as error:
        print(f"gradbox up --cluster: {error}", file=sys.stderr, flush=True)
        end_descendants(os.getpid(), mark)
        guardian.dismiss()
        os._exit(2)  # Ray's own end would wait for what is dead
    end_descendants(os.getpid(), mark)
    guardian.dismiss()
    return 0


def _run(options: argparse.Namespace, *, file: Path, stopping: threading.Event) -> None:
    token = secrets.token_hex(32) if options.address == LOCAL else ""
    if token:
        start_here(token)
    else:
        reach(options.address)
    # Only now: Ray reads its environment when it is imported.
    from gradbox_worker.cluster.head import head, machine, ray_session

    namespace = f"gradbox-{uuid.uuid4().hex[:12]}"
    devices = [part.strip() for part in options.device.split(",") if part.strip()]
    if token:
        joined = ray_session.start_here(
            namespace=namespace,
            folder=ray_session.new_folder(options.data),
            num_cpus=machine.cpus_here(),
        )
    else:
        ray_session.check_address(options.address)
        joined = ray_session.join(options.address, namespace=namespace)
    head.run(
        DeviceSettings(models_file=options.models, data=options.data),
        devices=devices,
        joined=joined,
        namespace=namespace,
        token=token,
        file=file,
        stopping=stopping,
    )
    ray_session.leave()
    if token:
        ray_session.remove_folder(options.data)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradbox_worker.cluster")
    parser.add_argument("--address", required=True, help="local, or that of Ray's head, HOST:PORT")
    parser.add_argument("--device", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
