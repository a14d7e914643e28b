"""Every command with its line in `gradbox --help`, by topic.

The lines of commands that other packages bring stand here too: to ask a package for its line is to
import it. A command that is listed nowhere is shown all the same, under "Other commands".
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Final

GROUP: Final = "gradbox.commands"
OTHER: Final = "Other commands"
TOPICS: Final[Mapping[str, Mapping[str, str]]] = {
    "Jobs": {
        "jobs": "your jobs on the box",
        "result": "wait for a job and fetch its result",
    },
    "A box": {
        "up": "run a whole box on this machine: Redis, service, a worker for every device",
        "models": "the models of a box, and the file that names them",
        "tokens": "create, list and revoke tokens of this box",
        "storage": "what the box's files take, by owner; `storage clean` removes some",
        "service": "run the HTTP service alone",
        "worker": "run jobs on one device of this machine",
        "demo": "run the main job end to end on real text and a real pretrained model",
    },
    "This machine": {
        "login": "keep a box's URL and token on this machine",
        "version": "say which gradbox",
    },
}
OWN: Final = ("jobs", "result", "login", "version")


def line_of(name: str) -> str:
    """Return a command's line in `gradbox --help`."""
    return next((lines[name] for lines in TOPICS.values() if name in lines), "")


def entries() -> dict[str, metadata.EntryPoint]:
    """Return how each command is loaded: the client's own, and what other packages bring."""
    own = {name: metadata.EntryPoint(name, f"gradbox.cli.{name}:register", GROUP) for name in OWN}
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)} | own
