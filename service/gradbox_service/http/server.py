"""Runs the app under uvicorn."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI

from gradbox_service.dashboard.board import Board
from gradbox_service.http.app import create_app
from gradbox_service.http.connections import BoundedProtocol, ConnectionLimits
from gradbox_service.http.event_hub import Hub
from gradbox_service.http.listening import bind, check_exposure, url_of
from gradbox_service.settings import BadSettings, Settings

log = logging.getLogger(__name__)


OPEN_FILES: Final = 2**16
TICKS_PER_S: Final = 10  # of uvicorn's server


class Server(uvicorn.Server):
    """Closes connections that are too slow; ends event streams before it waits for connections.

    A stream of a job that waits would keep its connection, and so the server, for hours.
    """

    def __init__(self, config: uvicorn.Config, *, hub: Hub, board: Board) -> None:
        super().__init__(config)
        self._hub = hub
        self._board = board

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_S == 0:
            for connection in tuple(self.server_state.connections):
                cast(BoundedProtocol, connection).close_if_slow()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.close()
        self._board.close()
        await super().shutdown(sockets)


def serve(
    settings: Settings,
    *,
    listening: Callable[[str], None] | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then end requests in order.

    Args:
        bound: a listening socket on the settings' host, to use in place of one of our own.
        listening: called with the service's URL once connections are accepted into the backlog.

    Raises:
        BadSettings: the settings name no usable Redis, certificate or data folder, or an address
            that others can overhear (see `check_exposure`).
        CannotListen: the port is in use, or the address is not this machine's.
    """
    warning = check_exposure(settings)
    if warning is not None:
        log.warning("%s", warning)
    _allow_connections()
    app = create_app(settings)
    settings.make_data_folder()
    with suppress(OSError):  # `gradbox storage` then goes by its own settings
        settings.note()
    config = _config(app, settings)
    bound = bound or bind(settings.host, settings.port)
    # uvicorn hands a signal on to the earlier handler once it has stopped; by then all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    try:
        if listening is not None:
            listening(url_of(bound, tls=settings.tls_cert is not None))
        gc.freeze()  # else some request waits 70 ms while all that was imported is looked at
        Server(config, hub=app.state.hub, board=app.state.board).run(sockets=[bound])
    finally:
        bound.close()


def _allow_connections() -> None:
    """Raise the soft limit of open files, which is often 1,024: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    limits = ConnectionLimits(
        max_head_bytes=settings.max_head_bytes,
        head_timeout_s=settings.head_timeout_s,
        body_timeout_s=settings.body_timeout_s,
    )
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(Any, partial(BoundedProtocol, limits=limits)),
        # Nothing here speaks WebSocket, and an upgraded connection would have other limits.
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Whoever it is: X-Forwarded-Proto decides the name of a session's cookie and whether it is
        # Secure, and nothing looks at X-Forwarded-For. A container's proxy has any address.
        forwarded_allow_ips="*",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=int(settings.drain_s),
    )
    try:
        config.load()
    except ssl.SSLError as error:
        raise BadSettings(
            f"TLS: {settings.tls_cert} and {settings.tls_key} are no certificate and its key in "
            f"PEM: {error.reason}"
        ) from None
    return config
