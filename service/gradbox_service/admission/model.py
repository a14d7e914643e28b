"""Which model a job means by NAME or NAME@VERSION."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from gradbox.errors import ServiceUnavailable, UnknownModel, UnusableModel
from gradbox.protocol import ModelView
from gradbox_service.fleet import Fleet, WorkerPresence
from gradbox_service.fleet.workers import offered_versions, unusable_models

MIN_VERSION_LENGTH = 8


def find_model(reference: str, *, workers: Sequence[WorkerPresence], fleet: Fleet) -> ModelView:
    """Return the model that `workers` offer under this reference.

    NAME alone means the version that most workers offer. VERSION may be cut short, to no fewer than
    eight characters.

    Raises:
        UnknownModel: no worker offers it; the message lists what there is.
        UnusableModel: it is registered, but no worker could build it; the message says why.
        ServiceUnavailable: workers are still starting, so nobody can say.
    """
    name, at, wanted = reference.partition("@")
    offered = offered_versions(workers)
    if name not in offered:
        if not offered or any(worker.state == "starting" for worker in workers):
            raise ServiceUnavailable(
                f"no worker offers a model {name!r} now, and one is starting or none runs; try "
                "again in a few seconds"
            )
        unusable = unusable_models(workers)
        if name in unusable:
            raise UnusableModel(
                f"the model {name!r} is registered on this box but cannot be used: "
                f"{unusable[name]} (once that is mended, the box's owner runs `gradbox models "
                f"reload`)"
            )
        raise UnknownModel(_unknown(name, list(offered)))
    version = _version(name, wanted, offered[name]) if at else offered[name][0]
    view = fleet.model(name, version=version)
    if view is None:
        raise ServiceUnavailable(f"the model {name!r} is being described; try again in a second")
    return view


def _version(name: str, wanted: str, offered: list[str]) -> str:
    found = [version for version in offered if version.startswith(wanted)]
    if wanted in offered:
        return wanted
    if len(wanted) < MIN_VERSION_LENGTH:
        raise UnknownModel(
            f"model {name!r}: a version needs at least {MIN_VERSION_LENGTH} characters, got "
            f"{wanted!r}; the box has {_shortened(offered)}"
        )
    if len(found) != 1:
        problem = "is not on this box" if not found else "is several versions"
        raise UnknownModel(
            f"model {name!r}: {wanted[:16]!r} {problem}; it has {_shortened(offered)}; name one of "
            "those, or leave the version out"
        )
    return found[0]


def _unknown(name: str, offered: list[str]) -> str:
    close = difflib.get_close_matches(name, offered, n=1)
    hint = (
        f"did you mean {close[0]!r}?" if close else "ask the box's owner to add it to models.toml"
    )
    return f"no model {name[:80]!r} is on this box; it has {', '.join(offered)}; {hint}"


def _shortened(versions: list[str]) -> list[str]:
    return [version[:16] for version in versions]
