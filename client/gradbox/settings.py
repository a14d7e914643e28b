"""Which box, and as whom: where a client finds a URL and a token that it was not given.

In this order, the first that says something:

1. the arguments of `GradClient`
2. GRADBOX_URL and GRADBOX_TOKEN
3. client.toml in the folder that GRADBOX_DATA names, else in ./gradbox-data: `gradbox up` wrote it
4. ~/.config/gradbox/client.toml (or under XDG_CONFIG_HOME): `gradbox login` wrote it

A token from a file goes only to the URL beside it. That is why this is our own and not
pydantic-settings, which takes each field from the first source that has it: the URL of one file
with the token of another. (It would also triple the time of this import.)
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gradbox.errors import ServiceUnavailable, Unauthorized
from gradbox.written_files import beside, read_written

FILE: Final = "client.toml"
DATA: Final = "gradbox-data"
# In a box's data folder: what its service was started with, but for defaults.
NOTED: Final = "settings.json"


@dataclass(frozen=True)
class ClientSettings:
    """A box's address, the token that it knows, and where the address was found."""

    url: str
    token: str = field(repr=False)
    source: str = field(default="", compare=False)

    @property
    def results(self) -> Path | None:
        """Where the box's result files are, if the address was found in the box's data folder."""
        file = Path(self.source)
        return file.with_name("results") if file.name == FILE else None


def find_settings(url: str | None = None, token: str | None = None) -> ClientSettings:
    """Complete what was given from the environment and from files.

    Raises:
        ServiceUnavailable: no URL was found, or one that is not http(s)://HOST.
        Unauthorized: no token for this URL was found, or one that no HTTP header can carry.
    """
    source = "" if url else "GRADBOX_URL"
    url = url or os.environ.get("GRADBOX_URL") or None
    token = token or os.environ.get("GRADBOX_TOKEN")
    if url:
        url = checked_url(url)
    for found in _from_files() if not (url and token) else ():
        if url is None:
            url, source = found.url, found.source
        if found.url == url:
            token = token or found.token
            break
    if url is None:
        raise ServiceUnavailable(
            "expected the address of a box, found none: start one here with `gradbox up`, "
            "or run `gradbox login`, or set GRADBOX_URL and GRADBOX_TOKEN"
        )
    if not token:
        raise Unauthorized(
            f"expected a token for {url}, found none: run `gradbox login --url {url}`, "
            f"or set GRADBOX_TOKEN; the box's owner makes one with `gradbox tokens create NAME`"
        )
    if not (token.isascii() and token.isprintable()):
        raise Unauthorized(
            f"expected the token for {url} to be of printable ASCII characters, got others among "
            f"its {len(token)}: copy it again, to GRADBOX_TOKEN or with `gradbox login --url {url}`"
        )
    return ClientSettings(url=url, token=token, source=source)


def login_file() -> Path:
    """Return the file that `gradbox login` writes."""
    config = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(config) if config else Path.home() / ".config"
    return folder / "gradbox" / FILE


def noted_reserve_bytes(data: Path) -> int | None:
    """Return what the last box on a data folder was told to leave free; None if it was not told.

    `gradbox storage` and `gradbox doctor` look at a box from beside it, and are to see it as it is.
    """
    try:
        found = json.loads((data / NOTED).read_bytes())["disk_reserve_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def write_settings(path: Path, settings: ClientSettings) -> None:
    """Write a client.toml that nobody else can read, whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A JSON string of printable ASCII is a TOML string as well.
    text = f"url = {json.dumps(settings.url)}\ntoken = {json.dumps(settings.token)}\n"
    with beside(path) as written:
        written.write_text(text, encoding="utf-8")


def read_settings(path: Path) -> ClientSettings | None:
    """Read a client.toml; None if there is no such file.

    Raises:
        Unauthorized: it is there and cannot be used.
    """
    try:
        document = tomllib.loads(read_written(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Unauthorized(f"{path}: expected a readable TOML file, got: {error}") from None
    url, token = document.get("url"), document.get("token")
    if not isinstance(url, str) or not isinstance(token, str):
        raise Unauthorized(
            f"{path}: expected the keys url and token, got {sorted(document)}; "
            f"remove the file and run `gradbox login`"
        )
    return ClientSettings(url=checked_url(url), token=token, source=str(path))


def checked_url(url: str) -> str:
    """Return the URL without a trailing slash.

    Raises:
        ServiceUnavailable: it is not http(s)://HOST.
    """
    why = _why_no_address(url)
    if why is not None:
        error = ServiceUnavailable(
            f"expected a box's address such as http://127.0.0.1:8642, got {url!r}: {why}; "
            f"name another one, in GRADBOX_URL or by `gradbox login`"
        )
        error.category = "user"  # unlike that of a box which cannot be reached now
        raise error
    return url.rstrip("/")


def _why_no_address(url: str) -> str | None:
    """Say why this is not http(s)://HOST[:PORT], as a clause; None if it is."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises if it is no port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if not parts.hostname:
        return "it names no host"
    return None if url.isprintable() else "a character of it cannot be printed"


def _from_files() -> Iterator[ClientSettings]:
    data = os.environ.get("GRADBOX_DATA")
    for path in ((Path(data) if data else Path(DATA)) / FILE, login_file()):
        found = read_settings(path)
        if found is not None:
            yield found
