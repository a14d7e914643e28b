"""`gradbox worker`: one worker for one device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gradbox_service.settings import Settings

GIB: Final = 2**30


def register(subparsers: Any) -> None:
    """Join the `gradbox` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "worker", help="run jobs on one device of this machine"
    )
    add_arguments(parser)
    parser.set_defaults(func=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what a worker is told; what is not given comes from the environment."""
    parser.add_argument(
        "--models", type=Path, default=Path("models.toml"), help="the models file [models.toml]"
    )
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda:N | mps [auto]")
    parser.add_argument(
        "--data", type=Path, help="the box's folder of blobs and results [GRADBOX_DATA]"
    )
    parser.add_argument(
        "--disk-reserve-bytes",
        help="what results leave free on the disk [GRADBOX_DISK_RESERVE_BYTES, the larger of 1 GiB "
        "and 5 %% of the disk]",
    )
    parser.add_argument("--redis-url", help="where the box's Redis is [GRADBOX_REDIS_URL]")
    parser.add_argument(
        "--name", help="what the worker is called; a restarted one gets its jobs back by it"
    )
    parser.add_argument(
        "--model-memory-gib",
        type=float,
        help="how much of the device the weights of idle models may keep [half of it]",
    )
    parser.add_argument(
        "--result-memory-gib",
        type=float,
        help="how much memory rows of per-sample results may take on their way to disk [an eighth "
        "of the device's, at most 4]",
    )
    parser.add_argument(
        "--job-memory-gib",
        type=float,
        help="how much memory one job may allocate before it fails as out of memory [what the host "
        "has available when it begins, less 1 GiB or 5 %% of its memory; of a GPU, all]",
    )
    parser.add_argument(
        "--checkpoint-after-s",
        type=float,
        help="once a gradient job has run so long, and twice as often from there, its state is "
        "written, from which another attempt goes on after a crash [60]",
    )
    parser.add_argument(
        "--device-log",
        type=Path,
        help="a file for what models print, at most 8 MiB and the 8 MiB before [standard error]",
    )
    parser.add_argument(
        "--spare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep a second process that has imported torch, to take a dead one's place at once",
    )
    parser.add_argument(
        "--lease-s",
        type=float,
        default=20.0,
        help="how long the worker may be silent before its job goes to another one [20]",
    )
    parser.add_argument(
        "--cancel-grace-s",
        type=float,
        default=30.0,
        help="how long a cancelled job may take to end before its process is killed [30]",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="start nothing: exit with 0 if the worker of this name lives, with 1 if not",
    )


def run(args: argparse.Namespace) -> int:
    """Work until told to stop.

    Returns:
        0 if it was told to stop (with --check: if it lives), 1 if it ended by itself, 2 if what it
        was given cannot be used, 3 if Redis does not answer.
    """
    import redis

    from gradbox.printable import log_to_stderr
    from gradbox_service.settings import BadSettings
    from gradbox_worker.errors import WorkerError

    log_to_stderr("worker[%(process)d] ")
    try:
        return _check(args) if args.check else _work(args)
    except (BadSettings, WorkerError) as error:
        print(f"gradbox worker: {error}", file=sys.stderr)
        return 2
    except redis.ConnectionError as error:
        print(f"gradbox worker: the box's Redis does not answer: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130


def _settings(args: argparse.Namespace) -> tuple[Settings, str]:
    """Return what the worker was told, and with it the address of Redis."""
    from gradbox_service.settings import BadSettings, Settings

    settings = Settings.read(
        redis_url=args.redis_url, data=args.data, disk_reserve_bytes=args.disk_reserve_bytes
    )
    if not settings.redis_url:
        raise BadSettings(
            "expected the address of the box's Redis, got none: give --redis-url or "
            "GRADBOX_REDIS_URL (`gradbox up` brings a Redis of its own)"
        )
    return settings, settings.redis_url


def _check(args: argparse.Namespace) -> int:
    from gradbox_service.jobs import RedisFleet, connect
    from gradbox_worker.turns.presence import default_name

    name = args.name or default_name(args.device)
    _, redis_url = _settings(args)
    fleet = RedisFleet(connect(redis_url))
    found = next((worker for worker in fleet.workers() if worker.name == name), None)
    print(f"{name}: {'not alive' if found is None else found.state}")
    return 0 if found is not None and found.models else 1


def _work(args: argparse.Namespace) -> int:
    from gradbox_service.jobs import connect
    from gradbox_service.store import result_store
    from gradbox_worker.device import DeviceProcess, DeviceSettings
    from gradbox_worker.models import read_models_file
    from gradbox_worker.turns.presence import NameLock, default_name
    from gradbox_worker.turns.rq_worker import GradboxWorker
    from gradbox_worker.turns.supervision import Patience

    settings, redis_url = _settings(args)
    read_models_file(args.models)  # a mistake in it is best heard at once
    device = DeviceProcess(
        DeviceSettings(
            models_file=args.models,
            data=settings.data,
            device=args.device,
            model_memory_bytes=_bytes(args.model_memory_gib),
            result_memory_bytes=_bytes(args.result_memory_gib),
            job_memory_bytes=_bytes(args.job_memory_gib),
            checkpoint_after_s=args.checkpoint_after_s,
            log=args.device_log,
            spare=args.spare,
        )
    )
    name = args.name or default_name(args.device)
    with NameLock(settings.data, name):
        worker = GradboxWorker(
            connect(redis_url),
            name=name,
            device=device,
            results=result_store(settings.data, reserve_bytes=settings.disk_reserve_bytes),
            patience=Patience(lease_s=args.lease_s, cancel_grace_s=args.cancel_grace_s),
        )
        worker.work(logging_level="WARNING")
    if worker.failure is not None:
        raise worker.failure
    return 0 if worker.leaving else 1


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
