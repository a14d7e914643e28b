"""DATA/cluster.json: how the coordinators of a box reach the cluster that its head runs."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gradbox_service.store.files import write_whole
from gradbox_worker.errors import DeviceNotStarted

log = logging.getLogger(__name__)

NAME: Final = "cluster.json"
LOOK_S: Final = 0.2


class ClusterAddress(BaseModel):
    """Where a cluster is.

    Attributes:
        address: of Ray's control service, HOST:PORT.
        namespace: in which the pool has its name; another one each time a head starts.
        token: of Ray's token authentication; "" where the environment has it.
        raylet: the socket of Ray's own process on this machine, which answers while it lives.
        num_devices: how many devices there are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str
    namespace: str
    token: str = ""
    raylet: str
    num_devices: int

    def write(self, path: Path) -> None:
        """Write it for the box's owner alone, whole or not at all."""
        write_whole(path, self.model_dump_json().encode())

    def answers(self) -> bool:
        """Return whether Ray lives on this machine."""
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(self.raylet)
            except OSError:
                return False
        return True

    @classmethod
    def wait(cls, path: Path) -> ClusterAddress:
        """Wait until a head has written it, and Ray lives; the caller ends with its worker."""
        said = False
        while True:
            with suppress(DeviceNotStarted):
                found = cls.read(path)
                if found.answers():
                    return found
            if not said:
                log.info("waiting for the head of a cluster to write %s", path)
                said = True
            time.sleep(LOOK_S)

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
