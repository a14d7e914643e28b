"""`gradbox version`."""

from __future__ import annotations

from importlib import metadata

from gradbox.cli.output import AsJson, say, say_json
from gradbox.protocol import PROTOCOL


def text() -> str:
    """Return the version as one line."""
    return f"gradbox {metadata.version('gradbox')}, protocol {PROTOCOL}"


def run(*, json: AsJson = False) -> int:
    """Print the version."""
    if json:
        say_json({"gradbox": metadata.version("gradbox"), "protocol": PROTOCOL})
    else:
        say(text())
    return 0
