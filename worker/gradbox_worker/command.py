"""`gradbox worker`: one worker for one device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from gradbox_service.settings import Settings
    from gradbox_worker.device import DeviceSettings
    from gradbox_worker.turns.supervision import Patience

GIB: Final = 2**30
MODELS_FILE: Final = Path("models.toml")


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    app.command("worker", help="run jobs on one device of this machine")(run)


# What is not given comes from the environment, or is what stands in brackets.
Models = Annotated[Path, typer.Option(metavar="FILE", help="the models file")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto | cpu | cuda:N | mps")]
DataFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="the box's folder of blobs and results [GRADBOX_DATA]"),
]
DiskReserve = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="what results leave free on the disk [GRADBOX_DISK_RESERVE_BYTES, the larger of 1 GiB "
        "and 5 % of the disk]",
    ),
]
RedisUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="where the box's Redis is [GRADBOX_REDIS_URL]")
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="what the worker is called; a restarted one gets its jobs back by it"
    ),
]
ModelMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="how much of the device the weights of idle models may keep [half of it]",
    ),
]
RunMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="how much of the device the states of runs may keep, and as much of the host's memory "
        "those that make way; the least recently used go to disk [a quarter of it]",
    ),
]
ResultMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="how much memory rows of per-sample results may take on their way to disk [an eighth "
        "of the device's, at most 4]",
    ),
]
JobMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="how much memory one job may allocate before it fails as out of memory [what the host "
        "has available when it begins, less 1 GiB or 5 % of its memory; of a GPU, all]",
    ),
]
CheckpointAfter = Annotated[
    float | None,
    typer.Option(
        envvar="GRADBOX_CHECKPOINT_AFTER_S",
        metavar="SECONDS",
        help="once a job has run so long, and twice as often from there, but for at most 3 % of "
        "its time, its state is written, from which another attempt goes on after a crash; 0: "
        "after every shard [60]",
    ),
]
DeviceLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="a file for what models print, at most 8 MiB and the 8 MiB before [standard error]",
    ),
]
BuildTimeout = Annotated[
    float,
    typer.Option(
        envvar="GRADBOX_BUILD_TIMEOUT_S",
        metavar="SECONDS",
        help="how long a model may take to be built and tried; one that takes longer is not usable",
    ),
]
Lease = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="how long the worker may be silent before its job goes to another one",
    ),
]
CancelGrace = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="how long a cancelled job may take to end before its process is killed",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="start nothing: exit with 0 if the worker of this name lives, with 1 if not",
    ),
]


def run(
    *,
    models: Models = MODELS_FILE,
    device: Device = "auto",
    data: DataFolder = None,
    disk_reserve_bytes: DiskReserve = None,
    redis_url: RedisUrl = None,
    name: Name = None,
    model_memory_gib: ModelMemory = None,
    run_memory_gib: RunMemory = None,
    result_memory_gib: ResultMemory = None,
    job_memory_gib: JobMemory = None,
    checkpoint_after_s: CheckpointAfter = None,
    device_log: DeviceLog = None,
    build_timeout_s: BuildTimeout = 600.0,
    lease_s: Lease = 20.0,
    cancel_grace_s: CancelGrace = 30.0,
    check: Check = False,
) -> int:
    """Work until told to stop.

    Returns:
        0 if it was told to stop (with --check: if it lives), 1 if that one does not live, 2 if what
        it was given cannot be used, 3 if Redis does not answer.
    """
    import redis

    from gradbox.printable import log_to_stderr
    from gradbox_service.settings import BadSettings, Settings, make_files_private
    from gradbox_worker.errors import WorkerError
    from gradbox_worker.turns.presence import default_name

    log_to_stderr("worker[%(process)d] ")
    make_files_private()
    name = name or default_name(device)
    try:
        settings = Settings.read(
            redis_url=redis_url, data=data, disk_reserve_bytes=disk_reserve_bytes
        )
        if check:
            return _check(name, redis_url=_address(settings))
        from gradbox_worker.device import DeviceSettings
        from gradbox_worker.turns.supervision import Patience

        device_settings = DeviceSettings(
            models_file=models,
            data=settings.data,
            device=device,
            model_memory_bytes=_bytes(model_memory_gib),
            run_memory_bytes=_bytes(run_memory_gib),
            result_memory_bytes=_bytes(result_memory_gib),
            job_memory_bytes=_bytes(job_memory_gib),
            checkpoint_after_s=checkpoint_after_s,
            log=device_log,
            build_timeout_s=build_timeout_s,
        )
        patience = Patience(lease_s=lease_s, cancel_grace_s=cancel_grace_s)
        return _work(name, settings=settings, device_settings=device_settings, patience=patience)
    except (BadSettings, WorkerError) as error:
        print(f"gradbox worker: {error}", file=sys.stderr)
        return 2
    except redis.ConnectionError as error:
        print(f"gradbox worker: the box's Redis does not answer: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130


def _address(settings: Settings) -> str:
    from gradbox_service.settings import BadSettings

    if not settings.redis_url:
        raise BadSettings(
            "expected the address of the box's Redis, got none: give --redis-url or "
            "GRADBOX_REDIS_URL (`gradbox up` brings a Redis of its own)"
        )
    return settings.redis_url


def _check(name: str, *, redis_url: str) -> int:
    from gradbox_service.database.connection import connect
    from gradbox_service.fleet import Fleet

    fleet = Fleet(connect(redis_url))
    found = next((worker for worker in fleet.workers() if worker.name == name), None)
    print(f"{name}: {'not alive' if found is None else found.state}")
    return 0 if found is not None and found.models else 1


def _work(
    name: str, *, settings: Settings, device_settings: DeviceSettings, patience: Patience
) -> int:
    from gradbox_service.database.connection import connect
    from gradbox_service.store import ResultStore
    from gradbox_worker.models import read_models_file
    from gradbox_worker.turns.presence import NameLock
    from gradbox_worker.turns.worker import Worker

    redis_url = _address(settings)
    read_models_file(device_settings.models_file)  # a mistake in it is best heard at once
    settings.make_data_folder()
    with NameLock(settings.data, name):
        connection = connect(redis_url)
        worker = Worker(
            connection,
            name=name,
            redis_url=redis_url,
            settings=device_settings,
            results=ResultStore(
                settings.data, connection=connection, reserve_bytes=settings.disk_reserve_bytes
            ),
            patience=patience,
        )
        worker.run()
    return 0


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
