"""Revocations that Redis does not take for now, kept in a folder that the service looks into first.

Redis refuses every change while its disk is full, which may be the very work of the user whose
token is to be revoked. So what it refuses is noted as an empty file, named by the SHA-256 of the
token: that takes a name in a folder, which a full disk still has. When Redis takes changes again,
`Tokens.reconcile` removes the tokens there and the notes here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gradbox.errors import ServiceUnavailable

NAME: Final = "revoked"


class NotRevoked(ServiceUnavailable):
    """A revocation could neither be made in Redis nor noted on the disk."""

    code = "not-revoked"
    title = "The token is still valid"


class Revocations:
    """The folder of one box, shared by its service and by `gradbox tokens`."""

    def __init__(self, data: Path) -> None:
        """Make nothing yet.

        Args:
            data: the box's data folder.
        """
        self.folder = data / NAME

    def prepare(self) -> None:
        """Make the folder, while there is room for it.

        Raises:
            OSError: there is none.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def digests(self) -> frozenset[str]:
        """Return the hashes that are noted."""
        try:
            return frozenset(os.listdir(self.folder))
        except FileNotFoundError:
            return frozenset()

    def holds(self, digest: str) -> bool:
        """Return whether a hash is noted."""
        return (self.folder / digest).exists()

    def add(self, digests: Iterable[str]) -> None:
        """Note hashes, on the disk when this returns.

        Raises:
            NotRevoked: there is no such folder, or no room for one more name.
        """
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for digest in digests:
                    (self.folder / digest).touch(mode=0o600)
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise NotRevoked(
                f"Redis takes no change for now, and the revocation cannot be noted in "
                f"{self.folder} ({error.strerror}): run this on the box's machine, with --data and "
                f"the box's data folder, or stop the service until Redis has room again"
            ) from error

    def remove(self, digests: Iterable[str]) -> None:
        """Remove notes of hashes."""
        for digest in digests:
            (self.folder / digest).unlink(missing_ok=True)
