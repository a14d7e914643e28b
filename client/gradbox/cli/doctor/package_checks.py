"""Checks of the packages that gradbox needs: whoever installs another version is only warned."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement

from gradbox.cli.doctor.finding import Finding, fine, problem

# The extras that a client or a box has; "" is what all have.
EXTRAS: Final = ("", "torch", "service", "worker", "cluster", "demo", "plot", "tracing")


def check_packages() -> Iterator[Finding]:
    """Yield whether the installed ones are of versions that this gradbox works with."""
    check, unfit = "packages", {}
    for wanted in _requirements():
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if not wanted.specifier.contains(found, prereleases=True):
            unfit[f"{wanted.name}{wanted.specifier}"] = f"{wanted.name} {found}"
    if not unfit:
        yield fine(check, f"of versions that gradbox {metadata.version('gradbox')} works with")
        return
    yield problem(
        check,
        "\n".join(f"expected {wanted}, got {found}" for wanted, found in unfit.items()),
        fix="pip install " + " ".join(f"'{wanted}'" for wanted in unfit),
    )


def _requirements() -> Iterator[Requirement]:
    for text in metadata.requires("gradbox") or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in EXTRAS):
            yield wanted
