"""DATA/cluster.json: how the coordinators of a box reach the cluster that its head runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gradbox_worker.errors import DeviceNotStarted

NAME: Final = "cluster.json"


class ClusterAddress(BaseModel):
    """Where a cluster is.

    Attributes:
        address: of Ray's control service, HOST:PORT.
        namespace: in which the pool has its name; another one each time a head starts.
        token: of Ray's token authentication; "" where the environment has it.
        num_devices: how many devices there were when the head was ready.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    namespace: str
    token: str = ""
    num_devices: int

    def write(self, path: Path) -> None:
        """Write it for the box's owner alone, whole or not at all."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.model_dump_json())
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> ClusterAddress:
        """Read it.

        Raises:
            DeviceNotStarted: no head has written it, or it is another version's.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise DeviceNotStarted(
                f"expected {path}, which the head of the cluster writes once it is ready, found "
                f"none; start the box with `gradbox up --cluster local`"
            ) from None
        except ValidationError as error:
            raise DeviceNotStarted(
                f"{path}: expected what this version's head of the cluster writes, got {error}; "
                f"start the box again"
            ) from None
