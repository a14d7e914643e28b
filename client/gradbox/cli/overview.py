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
        "submit": "submit a job that a TOML file describes",
        "jobs": "your jobs on the box",
        "result": "wait for a job and fetch its result",
        "blobs": "the tensors that you have sent to the box",
    },
    "A box, over the network": {
        "top": "devices and queue, live; q leaves it",
        "workers": "the box's workers, each with its device and job",
        "pause": "hand no more jobs to workers; what runs goes on, new jobs wait",
        "resume": "end a pause, or a drain that is not over",
        "drain": "refuse new jobs as well, and end the box once nothing runs",
    },
    "A box, on its own machine": {
        "up": "run a whole box on this machine: Redis, service, a worker for every device",
        "down": "stop the box that `gradbox up` runs on a data folder",
        "models": "the models of a box, and the file that names them",
        "tokens": "create, list and revoke tokens of this box",
        "storage": "what the box's files take, by owner; `storage clean` removes some",
        "backup": "copy a box's records, tokens and models file, also while it runs",
        "service": "run the HTTP service alone",
        "worker": "run jobs on one device of this machine",
        "demo": "run the main job end to end on real text and a real pretrained model",
    },
    "This machine": {
        "doctor": "say what is wrong with an installation or a box, and the fix",
        "login": "keep a box's URL and token on this machine",
        "version": "say which gradbox",
    },
}
# The client's own commands, and who registers each.
OWN: Final[Mapping[str, str]] = {
    "submit": "submit:register",
    "jobs": "jobs:register",
    "result": "result:register",
    "blobs": "blobs:register",
    "top": "top:register_top",
    "workers": "top:register_workers",
    "pause": "operation:register_pause",
    "resume": "operation:register_resume",
    "drain": "operation:register_drain",
    "down": "down:register",
    "backup": "backup:register",
    "doctor": "doctor.command:register",
    "login": "login:register",
    "version": "version:register",
}


def line_of(name: str) -> str:
    """Return a command's line in `gradbox --help`."""
    return next((lines[name] for lines in TOPICS.values() if name in lines), "")


def entries() -> dict[str, metadata.EntryPoint]:
    """Return how each command is loaded: the client's own, and what other packages bring."""
    own = [metadata.EntryPoint(name, f"gradbox.cli.{OWN[name]}", GROUP) for name in OWN]
    return {entry.name: entry for entry in (*metadata.entry_points(group=GROUP), *own)}
