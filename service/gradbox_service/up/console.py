"""What `gradbox up` says of itself, on standard error, and how others reach the box."""

from __future__ import annotations

import getpass
import os
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gradbox_service.database.connection import connect
from gradbox_service.fleet.workers import Fleet, unusable_models
from gradbox_service.http.listening import is_loopback

# How often it is said what a box that is not ready waits for.
WAITS_S: Final = 5.0


class NotReady:
    """Says now and then what is waited for, since this was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._next_s = self._began_s + WAITS_S

    def because(self, what: str) -> None:
        """Say what is waited for, if that is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + WAITS_S
            say(f"not ready yet, after {now_s - self._began_s:.0f} s: {what}")


def say(text: str) -> None:
    """Write lines, each with its end in one write: `demo` and others print to the same terminal.

    In a file each says when; a journal notes that by itself, and whoever sits before a terminal
    knows.
    """
    in_file = stat.S_ISREG(os.fstat(2).st_mode)
    when = time.strftime("%Y-%m-%d %H:%M:%S ") if in_file else ""
    for line in text.split("\n"):
        print(f"{when}gradbox up: {line}\n", end="", file=sys.stderr, flush=True)


def how_to_reach(url: str, *, host: str, public_url: str | None, data: Path) -> str:
    """Return the lines that `gradbox up` says once jobs can run.

    Args:
        url: how this machine reaches the box.
        host: the address that it listens on.
        public_url: how others reach it, where the owner said so.
    """
    parts = urlsplit(url)
    here, port = socket.gethostname(), parts.port
    lines = [f"GradClient() finds address and token with GRADBOX_DATA={data}"]
    if public_url is None and not is_loopback(host):
        public_url = f"{parts.scheme}://{here}:{port}"
    if public_url is not None:
        lines.append(f"others reach it with `gradbox login --url {public_url}`")
    else:
        lines.append("others reach it through a tunnel and `gradbox login --url " + url + "`")
    lines += [
        f"a tunnel from another machine: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{here}",
        f"a token for each of them: gradbox tokens create NAME --data {data}",
    ]
    return "\n".join(lines)


def what_is_there(redis_url: str, *, on_cluster: bool) -> list[str]:
    """Return a line on a cluster's devices, and one for each model that could not be built."""
    connection = connect(redis_url)
    try:
        workers = Fleet(connection).workers()
    finally:
        connection.close()
    ready = sum(worker.state != "starting" for worker in workers)
    devices = [f"the cluster has {ready} device(s)"] if on_cluster else []
    unusable = unusable_models(workers)
    return devices + [
        f"the model {name!r} cannot be used: {why}; mend it, then `gradbox models reload`"
        for name, why in unusable.items()
    ]
