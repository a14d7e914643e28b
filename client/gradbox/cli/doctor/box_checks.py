"""Checks of the box that clients on this machine are led to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import httpx

from gradbox.cli.doctor.finding import Finding, fine, problem, skipped
from gradbox.cli.down import LOCK, holder_of
from gradbox.cli.output import duration
from gradbox.errors import GradboxError, ServiceUnavailable, Unauthorized
from gradbox.http.connection import Connection, Retry
from gradbox.settings import FILE, ClientSettings, find_settings

TIMEOUT_S: Final = 10.0
# Within it tokens, job ages and expiry are told truly enough.
CLOCK_SKEW_S: Final = 30.0


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
    connection = Connection(settings, timeout_s=TIMEOUT_S, retry=Retry(patience_s=0))
    try:
        yield from _check_answers(settings, connection)
    finally:
        connection.close()


def _check_answers(settings: ClientSettings, connection: Connection) -> Iterator[Finding]:
    try:
        alive = connection.request("GET", "/livez")
    except GradboxError as error:
        yield _unreachable(settings, error)
        return
    yield fine("service", "answers")
    yield _clock(alive)
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


def _clock(answer: httpx.Response) -> Finding:
    try:
        there_s = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return skipped("clock", "the box does not tell its time")
    skew_s = there_s - time.time()
    if abs(skew_s) <= CLOCK_SKEW_S:
        return fine("clock", "agrees with the box's")
    direction = "ahead of" if skew_s > 0 else "behind"
    return problem(
        "clock",
        f"the box's clock is {duration(abs(skew_s))} {direction} this machine's",
        fix="let both keep time by NTP (timedatectl set-ntp true)",
    )


def _readiness(connection: Connection) -> Iterator[Finding]:
    answer = connection.request("GET", "/readyz", accept=(500, 503))
    said = answer.json()
    if answer.is_success:
        mode = said.get("mode", "running")
        held = "" if mode == "running" else f"; {mode}: {said.get('reason') or 'no reason given'}"
        models = ", ".join(said["models"]) or "none"
        yield fine("workers", f"{said['workers']} ready, with the models {models}{held}")
        if said.get("builds"):
            yield fine("building", f"after a reload a worker {said['builds']}")
        if said.get("refuses"):
            yield problem(
                "room",
                f"new jobs are refused: {said['refuses']}",
                fix="gradbox storage clean, or more of it (--redis-memory-bytes, a larger disk)",
            )
        return
    detail = str(said.get("detail", answer.text))
    if str(said.get("type")).endswith(":draining"):
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
