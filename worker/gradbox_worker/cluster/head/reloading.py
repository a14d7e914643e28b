"""Has devices build their models anew when the box's are read again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Set
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayActorError

from gradbox_worker.cluster.exchange.shipped_models import FilesToShip
from gradbox_worker.cluster.head.leases import Leases
from gradbox_worker.cluster.head.model_versions import ModelVersions

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.25
# Of devices that build their models anew, and of those whose models were others then: they stay
# with it until the next reload.
REBUILDING: Final = "rebuilding"


class Reloading:
    """Whether devices have the models that count, and the restart of those that may not."""

    def __init__(
        self,
        actors: Mapping[str, Any],
        leases: Leases,
        files: FilesToShip,
        *,
        first: Set[str],
        rebuilt: Callable[[str], None],
        died: Callable[[str], None],
    ) -> None:
        """Have restarted no device.

        Args:
            actors: those of all devices, by name, as they are at any time.
            leases: where a device is taken while it restarts.
            files: of the models, which are read again.
            first: the devices whose models' versions count, as they are at any time.
            rebuilt: called with the name of a device that can be leased again.
            died: called with the name of one that Ray does not start again.
        """
        self._actors = actors
        self._leases = leases
        self._files = files
        self._first = first
        self._rebuilt = rebuilt
        self._died = died
        self._versions = ModelVersions()
        self._reloads: int | None = None  # those that the devices' models are as of
        self._last: asyncio.Task[None] | None = None

    def problem(self, name: str, described: Mapping[str, Any]) -> str:
        """Say why a device may not be used, or ""."""
        return self._versions.problem(name, described["models"], software=described["software"])

    @property
    def has_begun(self) -> bool:
        """Whether models were ever read again: a device that comes may be older than that."""
        return self._last is not None

    async def reach(self, reloads: int) -> None:
        """Have devices with models as they were when so many reloads had been asked for.

        The first coordinator that asks comes when they have just been built.
        """
        if self._reloads is None:
            self._reloads = reloads
        if reloads > self._reloads:
            self._reloads = reloads
            self._begin(self._reload())
        if self._last is not None:
            await asyncio.shield(self._last)

    def restart(self, name: str) -> None:
        """Have one idle device build its models anew, once no reload is under way."""
        self._leases.take(name, REBUILDING)
        self._begin(self._restart(name))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to do something once what was begun before has ended."""
        self._last = asyncio.get_running_loop().create_task(_done_after(self._last, work))

    async def _reload(self) -> None:
        """Restart all devices, first those whose versions count."""
        self._versions = ModelVersions()
        self._files.forget()
        names = list(self._actors)
        for first in (True, False):
            some = [name for name in names if (name in self._first) is first]
            await asyncio.gather(*map(self._restart, some))

    async def _restart(self, name: str) -> None:
        """Start a device anew once it is idle, and have it leased if its models are the others'."""
        while self._leases.has(name) and not self._leases.take(name, REBUILDING):
            await asyncio.sleep(PAUSE_S)
        if (actor := self._actors.get(name)) is None:
            return
        try:
            described = await _described_anew(actor)
        except ActorDiedError as error:
            log.warning("device %s is gone for good: %s", name, error)
            self._died(name)
            return
        if problem := self.problem(name, described):
            log.warning("%s", problem)
        else:
            self._rebuilt(name)


async def _done_after(earlier: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
    if earlier is not None:
        await asyncio.wait([earlier])
    await work


async def _described_anew(actor: Any) -> Mapping[str, Any]:
    """Have an actor begin again as another process, and return how that describes itself."""
    before: int | None = None
    while True:
        try:
            described: Mapping[str, Any] = await actor.describe.remote()
        except ActorDiedError:
            raise
        except RayActorError:
            await asyncio.sleep(PAUSE_S)  # it is starting
            continue
        if before is None:
            before = described["process"]
            ray.kill(actor, no_restart=False)
        elif described["process"] != before:
            return described
