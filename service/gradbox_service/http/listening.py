"""The address that the service listens on, who can overhear it there, and whether TLS will do."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

from gradbox.errors import GradboxError
from gradbox_service.settings import KIB, BadSettings, Settings

BACKLOG = 2048
# What the kernel takes of an answer beyond what is on its way; with less, downloads are slower.
UNSENT_BYTES: Final = 256 * KIB


class CannotListen(GradboxError):
    """The address that the service was to listen on cannot be had."""

    code = "cannot-listen"
    title = "The address cannot be had"
    category = "user"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        CannotListen: the message names the address and what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Its connections have the same. By itself the kernel takes some MB that a client does not read
    # yet, and reports a slow one that goes on reading only when it has read a third of them.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
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


def url_of(bound: socket.socket, *, tls: bool = False) -> str:
    """Return the URL under which a listening socket is reached from this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_exposure(settings: Settings) -> str | None:
    """Return what to say aloud about who can read along, if anything.

    Raises:
        BadSettings: tokens and tensors would cross a network in the clear and nobody said that
            they may, or the settings of TLS are incomplete.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise BadSettings("TLS wants both: give --tls-cert and --tls-key, or neither")
    for path in (settings.tls_cert, settings.tls_key):
        if path is not None and not path.is_file():
            raise BadSettings(f"TLS: expected a PEM file at {path}, found none")
    if settings.tls_cert is not None or is_loopback(settings.host):
        return None
    exposed = (
        f"{settings.host} is reached over the network, and without TLS whoever is on the way reads "
        f"and changes tokens, models' weights and results"
    )
    if not settings.insecure:
        raise BadSettings(
            f"{exposed}: give --tls-cert and --tls-key, or listen on 127.0.0.1 and let an SSH "
            f"tunnel or a proxy with TLS stand before it, or say --insecure where the network is "
            f"yours alone"
        )
    return f"INSECURE: {exposed}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
