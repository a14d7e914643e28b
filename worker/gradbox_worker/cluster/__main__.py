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
from contextlib import closing
from pathlib import Path
from typing import Final

from gradbox.printable import log_to_stderr
from gradbox_service.database.connection import connect
from gradbox_service.fleet import Fleet
from gradbox_service.store import BlobStore, ResultStore
from gradbox_worker.cluster import ray_session
from gradbox_worker.cluster.machines import cpus_here
from gradbox_worker.device.descendants import MARK, Guardian, end_descendants
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.errors import WorkerError
from gradbox_worker.turns.presence import NameLock
from gradbox_worker.turns.supervision import Patience

log = logging.getLogger(__name__)

LOCAL: Final = "local"
NAME: Final = "cluster"
CHECKPOINT_AFTER: Final = "GRADBOX_CHECKPOINT_AFTER_S"


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
    mark = secrets.token_hex(16)
    guardian = Guardian(os.getpid(), mark)
    os.environ[MARK] = mark
    try:
        with NameLock(options.data, NAME):
            _run(options, stopping=stopping)
    except WorkerError as error:
        print(f"gradbox up --cluster: {error}", file=sys.stderr, flush=True)
        end_descendants(os.getpid(), mark)
        guardian.dismiss()
        os._exit(2)  # Ray's own end would wait for what is dead
    end_descendants(os.getpid(), mark)
    guardian.dismiss()
    return 0


def _run(options: argparse.Namespace, *, stopping: threading.Event) -> None:
    if options.address == LOCAL:
        folder = ray_session.new_folder(options.data)
        joined = ray_session.start_here(folder=folder, num_cpus=cpus_here())
    else:
        joined = ray_session.join(options.address)
    # Only now: they import Ray.
    from gradbox_worker.cluster.head import ClusterDevices
    from gradbox_worker.cluster.taking import TurnTaker

    settings = DeviceSettings(
        models_file=options.models,
        data=options.data,
        checkpoint_after_s=options.checkpoint_after_s,
        redis_url=options.redis_url,
    )
    with closing(connect(options.redis_url)) as connection:
        devices = ClusterDevices(
            settings,
            devices=[part.strip() for part in options.device.split(",") if part.strip()],
            mark=options.data / f"{NAME}.mark",
            fleet=Fleet(connection),
        )
        taker = TurnTaker(
            connection,
            devices,
            joined=joined,
            results=ResultStore(
                options.data,
                connection=connection,
                reserve_bytes=options.disk_reserve_bytes,
            ),
            blobs=BlobStore(options.data, connection=connection),
            patience=Patience(),
        )
        taker.recover()
        log.info(
            "the cluster at %s has %d devices", joined.address, devices.start(stopping=stopping)
        )
        taker.run(stopping)
    ray_session.leave()
    if options.address == LOCAL:
        ray_session.remove_folder(options.data)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradbox_worker.cluster")
    parser.add_argument("--address", required=True, help="local, or that of Ray's head, HOST:PORT")
    parser.add_argument("--device", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--disk-reserve-bytes", type=int)
    parser.add_argument(
        "--checkpoint-after-s", type=float, default=os.environ.get(CHECKPOINT_AFTER)
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
