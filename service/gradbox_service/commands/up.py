"""`gradbox up`: one box, nothing else to install.

It holds the data folder's lock, the listening socket and an embedded Redis, and keeps a service and
one worker for every device running as children. The socket outlives the service: while that is
started again, connections wait instead of being refused. Children end with it, also when it is
killed; a job that was running then is taken up by the next `up` on the same folder.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gradbox.settings import checked_url
from gradbox_service.settings import (
    BadSettings,
    Settings,
    arguments_of,
    make_files_private,
    takes_settings,
)

MODELS_FILE: Final = "models.toml"
WORKER_PACKAGES: Final = ("torch", "rq")
# Settings of a service alone: a box has a Redis of its own.
NOT_OURS: Final = ("redis_url",)
EXAMPLE: Final = """\
  [models.minilm]
  builder = "hf"
  source = "sentence-transformers/all-MiniLM-L6-v2\""""


def register(app: typer.Typer) -> None:
    """Join the `gradbox` command."""
    text = "run a whole box on this machine: Redis, service, a worker for every device"
    app.command("up", help=text)(run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"expected at least one worker, got {text!r}")
    return int(text)


ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="the models file (DATA/models.toml, else ./models.toml)"),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(parser=_count, metavar="N", help="how many workers (one for every device)"),
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="auto, cpu, or a list such as cuda:0,cuda:1")
]
BuildTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="how long a model may take to be built and tried; one that takes longer is not usable "
        "(GRADBOX_BUILD_TIMEOUT_S, 600)",
    ),
]
PublicUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="how others reach the box, as they are shown")
]
Wait = Annotated[
    bool,
    typer.Option("--wait", help="run it in the background, and return once jobs can run"),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        metavar="local|ADDRESS",
        help="run jobs on a Ray cluster, where one may use many devices: one that is started on "
        "this machine, or the one at HOST:PORT, of which this machine is a node",
    ),
]
Exec = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="CMD",
        help="once jobs can run, run this shell command with GRADBOX_URL and GRADBOX_TOKEN set, "
        "then stop and exit with its code",
    ),
]


@takes_settings(leave_out=NOT_OURS)
def run(
    given: dict[str, Any],
    *,
    models: ModelsFile = None,
    workers: NumWorkers = None,
    device: Device = "auto",
    build_timeout_s: BuildTimeout = None,
    cluster: OnCluster = None,
    public_url: PublicUrl = None,
    wait: Wait = False,
    script: Exec = None,
) -> int:
    """Run the box until Ctrl-C or SIGTERM.

    Returns:
        0 if it was asked to stop (with --wait: if jobs can run), 1 if a part did not start, 2 if
        what was given cannot be used; with --exec what the command returned.
    """
    import uvicorn  # noqa: F401 - the service that is started needs it: better said at once

    from gradbox_service.up import background
    from gradbox_service.up.box import Box
    from gradbox_service.up.console import say
    from gradbox_service.up.devices import Cluster, spread
    from gradbox_service.up.processes import Script

    umask = make_files_private()
    _check_worker_packages(with_cluster=cluster is not None)
    if wait and script is not None:
        raise BadSettings("expected --wait or --exec, got both: --exec waits by itself")
    if cluster is not None and workers is not None:
        raise BadSettings(
            "expected --workers or --cluster, got both: a cluster runs a job on every device that "
            "--device says of each machine"
        )
    public_url = None if public_url is None else checked_url(public_url)
    settings = Settings.read(**given)
    if os.environ.get("GRADBOX_REDIS_URL"):
        say("GRADBOX_REDIS_URL is not used, up runs its own")
    found = models_file(models, data=settings.data)
    if wait:
        again = ["--models", str(found), "--device", device]
        again += [] if workers is None else ["--workers", str(workers)]
        again += [] if public_url is None else ["--public-url", public_url]
        again += [] if build_timeout_s is None else ["--build-timeout-s", str(build_timeout_s)]
        again += [] if cluster is None else ["--cluster", cluster]
        again += arguments_of(settings, leave_out=NOT_OURS)
        return background.start(again, settings=settings)
    box = Box(
        settings,
        models_file=found,
        devices=[] if cluster else spread(device, num_workers=workers),
        build_timeout_s=build_timeout_s,
        cluster=None if cluster is None else Cluster(cluster, device=device),
        public_url=public_url,
        script=None if script is None else Script(script, umask=umask),
    )
    return box.run()


def _check_worker_packages(*, with_cluster: bool) -> None:
    if with_cluster and importlib.util.find_spec("ray") is None:
        raise BadSettings(
            "expected Ray on this machine, it is not installed: pip install 'gradbox[cluster]'"
        )
    missing = [name for name in WORKER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BadSettings(
            f"expected what the workers need on this machine, {', '.join(missing)} is not "
            f"installed: pip install 'gradbox[worker]'"
        )


def models_file(given: Path | None, *, data: Path) -> Path:
    """Return the models file to use.

    Raises:
        BadSettings: there is none.
    """
    paths = [given] if given is not None else [data / MODELS_FILE, Path(MODELS_FILE)]
    for path in paths:
        if path.is_file():
            return path.resolve()
    raise BadSettings(
        f"expected a models file at {' or '.join(str(path) for path in paths)}, found none; "
        f"name one with --models, or write one such as\n\n{EXAMPLE}\n"
    )
