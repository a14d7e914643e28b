"""Runs the app under uvicorn."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from gradbox.errors import GradboxError
from gradbox_service.http.app import create_app
from gradbox_service.http.event_hub import Hub
from gradbox_service.settings import Settings

BACKLOG = 2048


class CannotListen(GradboxError):
    """The address that the service was to listen on cannot be had."""

    code = "cannot-listen"
    title = "The address cannot be had"


class Server(uvicorn.Server):
    """Ends open event streams before it waits for connections to close.

    A stream of a job that waits would keep its connection, and so the server, for hours.
    """

    def __init__(self, config: uvicorn.Config, *, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.close()
        await super().shutdown(sockets)


def serve(
    settings: Settings,
    *,
    listening: Callable[[str], None] | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then end requests in order.

    Args:
        bound: a listening socket to use in place of the settings' host and port.
        listening: called with the service's URL once connections are accepted into the backlog.

    Raises:
        BadSettings: the settings name no usable Redis.
        CannotListen: the port is in use, or the address is not this machine's.
    """
    app = create_app(settings)
    bound = bound or bind(settings.host, settings.port)
    # uvicorn hands a signal on to the earlier handler once it has stopped; by then all is done.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    try:
        if listening is not None:
            listening(url_of(bound))
        _server(app, settings).run(sockets=[bound])
    finally:
        bound.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        CannotListen: the message names the address and what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there: stop it, or choose another port with --port"
        else:
            why = f"{error.strerror}: choose another address with --host and --port"
        raise CannotListen(f"cannot listen on {host}:{port}: {why}") from None
    return found


def url_of(bound: socket.socket) -> str:
    """Return the URL under which a listening socket is reached from this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(app: FastAPI, settings: Settings) -> Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_s),
    )
    return Server(config, hub=app.state.hub)
