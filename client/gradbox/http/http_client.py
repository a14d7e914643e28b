"""What sends requests to one box: whom it trusts, and what it sends with each."""

from __future__ import annotations

from importlib import metadata
from typing import Final
from urllib.parse import urlsplit

import httpx

from gradbox.settings import ClientSettings

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def http_client(settings: ClientSettings, transport: httpx.BaseTransport | None) -> httpx.Client:
    """Return an httpx client with the token for one box.

    Args:
        transport: what is used in place of the network.
    """
    address = urlsplit(settings.url)
    return httpx.Client(
        transport=transport,
        # A machine reaches itself without a proxy, whatever the environment names. Whose
        # certificates are trusted is the environment's to say all the same: SSL_CERT_FILE.
        trust_env=address.hostname not in LOOPBACK,
        verify=httpx.create_ssl_context() if address.scheme == "https" else True,
        headers={
            "Authorization": f"Bearer {settings.token}",
            "User-Agent": f"gradbox/{metadata.version('gradbox')}",
        },
    )
