"""How a box is reached and what it lacks, said to whoever starts it."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from urllib.parse import urlsplit

from gradbox_service.database.connection import connect
from gradbox_service.fleet.workers import Fleet, unusable_models
from gradbox_service.http.listening import is_loopback


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


def left_out(redis_url: str) -> list[str]:
    """Return a line for each model that could not be built; the others are served."""
    connection = connect(redis_url)
    try:
        unusable = unusable_models(Fleet(connection).workers())
    finally:
        connection.close()
    return [
        f"the model {name!r} cannot be used: {why}; mend it, then `gradbox models reload`"
        for name, why in unusable.items()
    ]
