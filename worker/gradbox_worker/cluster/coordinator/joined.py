"""The cluster as a coordinator sees it: the pool, and what it is told of models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from gradbox.protocol import ModelView
from gradbox_worker.cluster.exchange.array_buffers import READ_ONLY
from gradbox_worker.cluster.head.address_file import ClusterAddress
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest
from gradbox_worker.cluster.head.pool import POOL
from gradbox_worker.cluster.head.ray_session import join
from gradbox_worker.errors import DeviceNotStarted

POLL_S: Final = 0.2


class ClusterGone(Exception):
    """The head or the pool ended; a new one has another address."""


class JoinedCluster:
    """A cluster that this process has joined.

    Attributes:
        views: its models, by name.
        hardware: what its first device calls itself.
    """

    def __init__(self, path: Path, *, reloads: int = 0) -> None:
        """Join the cluster that a head has.

        Args:
            reloads: how many reloads of the models had been asked for; the devices' are as of then.

        Raises:
            DeviceNotStarted: there is none, or it cannot be joined.
        """
        self._path = path
        self._address = ClusterAddress.read(path)
        warnings.filterwarnings("ignore", message=READ_ONLY)
        join(self._address.address, namespace=self._address.namespace)
        try:
            self._pool: Any = ray.get_actor(POOL)
            ray.get(self._pool.have_models.remote(reloads))
            device = ray.get(self._pool.any_device.remote())
            if device is None:
                raise DeviceNotStarted("expected a cluster with devices, which has none left")
            described = ray.get(device.describe.remote())
        except (RayError, ValueError) as error:
            raise DeviceNotStarted(f"expected a cluster with devices, got: {error}") from error
        models = [ModelView.model_validate_json(text) for text in described["models"]]
        self.views = {view.name: view for view in models}
        self.hardware: str = described["hardware"]

    def lease(
        self, request: LeaseRequest, *, while_waiting: Callable[[], object]
    ) -> list[LeasedDevice]:
        """Wait for one device, and return it with what else is idle then.

        Args:
            while_waiting: called every 0.2 s; what it raises comes through, and ends the lease.

        Raises:
            ClusterGone: the pool ended.
        """
        asked = self._pool.lease.remote(request, os.getpid())
        try:
            while not ray.wait([asked], timeout=POLL_S)[0]:
                while_waiting()
                self.check()
            granted: list[LeasedDevice] = ray.get(asked)
        except RayError as error:
            raise ClusterGone(str(error)) from error
        except BaseException:
            self.end(request.lease)
            raise
        return granted

    def more(self, request: LeaseRequest) -> list[LeasedDevice]:
        """Return idle devices, perhaps none, for a lease.

        Raises:
            ClusterGone: the pool ended.
        """
        try:
            found: list[LeasedDevice] = ray.get(self._pool.more.remote(request))
        except RayError as error:
            raise ClusterGone(str(error)) from error
        return found

    def give_back(self, leased: LeasedDevice) -> None:
        """Give a device back before the lease ends: it has ended its part, or died."""
        self._pool.give_back.remote(leased.name, leased.lease)

    def end(self, lease: str, *, at_rest: bool = False) -> None:
        """Give all devices of a lease back, and wait for nothing: who wants several waits then.

        Args:
            at_rest: whether they have answered all they were asked.
        """
        self._pool.end.remote(lease, at_rest)

    def check(self) -> None:
        """Look whether the head is the one that was joined.

        Raises:
            ClusterGone: it ended, and perhaps another one has its place.
        """
        try:
            same = ClusterAddress.read(self._path).namespace == self._address.namespace
        except DeviceNotStarted:
            same = False
        if not same:
            raise ClusterGone("the head of the cluster ended")
