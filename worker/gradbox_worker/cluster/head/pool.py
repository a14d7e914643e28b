"""The pool: an actor beside the head that leases devices to coordinators.

It is told of devices by the head, and of leases by coordinators, each of which gives its process:
when that dies, what it had leased is stopped, made empty and lent again. A device that died comes
back once Ray has started it anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from gradbox_worker.cluster.exchange.shipped_models import FilesToShip
from gradbox_worker.cluster.head.coordinator_watch import CoordinatorWatch
from gradbox_worker.cluster.head.kept_messages import KeptMessages
from gradbox_worker.cluster.head.leases import Leases, Lent, Wish
from gradbox_worker.cluster.head.model_versions import ModelVersions
from gradbox_worker.models.shipping import ShippedModels

log = logging.getLogger(__name__)

POOL: Final = "pool"
# After its coordinator's death a device may take so long to come to its next shard.
ABANDON_S: Final = 30.0
PAUSE_S: Final = 0.25
# So long a lease of several devices, or of certain ones, waits for those that are being made empty.
IDLE_S: Final = 1.0
# Of devices that build their models anew, and of those whose models were others then: they stay
# with it until the next reload.
REBUILDING: Final = "rebuilding"


class Pool:
    """The devices of one box. An asynchronous actor: all its methods run in one loop."""

    def __init__(self, models_file: Path) -> None:
        """Have no device.

        Args:
            models_file: of the box, for machines that do not have it.
        """
        self._messages = KeptMessages()
        self._leases = Leases()
        self._actors: dict[str, Any] = {}
        self._writing: set[str] = set()  # devices that may write to files of the box
        self._granted: dict[str, asyncio.Future[list[Lent]]] = {}
        self._taking_back: dict[str, asyncio.Task[None]] = {}
        self._dropping: dict[str, asyncio.Task[None]] = {}  # by device: graphs that wait too long
        self._coordinators = CoordinatorWatch(self._abandoned)
        self._tasks: set[asyncio.Task[None]] = set()
        self._files = FilesToShip(models_file)
        self._versions = ModelVersions()
        self._reloads: int | None = None  # those that the devices' models are as of
        self._rebuilding: asyncio.Task[None] | None = None

    async def messages(self) -> list[str]:
        """Return what was logged since the last call."""
        return self._messages.taken()

    async def models(self) -> ShippedModels:
        """Return the models, for a machine that is not the head's."""
        return await self._files.models()

    async def model_file(self, path: Path) -> list[Any]:
        """Return a reference to a file's bytes, in a list, for Ray would wait for its value.

        Raises:
            PermissionError: it is none of the models' files.
        """
        return [await self._files.reference(path)]

    async def add(self, name: str, actor: Any, described: Mapping[str, Any], here: bool) -> str:
        """Have one more device, which is ready.

        Args:
            described: see `ClusterDevice.describe`.
            here: whether it is on the head's machine.

        Returns:
            Why it is refused; "" if it is not.
        """
        self._files.forget()
        if self._rebuilding is None and (problem := self._problem(name, described)):
            return problem
        self._actors[name] = actor
        if here and described["sees_files"]:
            self._writing.add(name)
        self._leases.add(name, sees_files=described["sees_files"])
        if self._rebuilding is not None:  # it may have begun before the models were read again
            self._leases.take(name, REBUILDING)
            self._rebuild([name])
        self._grant()
        return ""

    async def have_models(self, reloads: int) -> None:
        """Have devices with models as they were when so many reloads had been asked for.

        Devices that began before are started anew, each after its job. The first coordinator that
        asks comes when they have just been.
        """
        if self._reloads is None:
            self._reloads = reloads
        if reloads > self._reloads:
            self._reloads = reloads
            self._rebuild()
        if self._rebuilding is not None:
            await asyncio.shield(self._rebuilding)

    async def remove(self, name: str) -> None:
        """Forget a device whose machine is gone."""
        self._actors.pop(name, None)
        self._writing.discard(name)
        self._leases.remove(name)

    async def num_devices(self) -> int:
        """Return how many devices there are, idle or not."""
        return self._leases.num_devices

    async def any_device(self) -> Any:
        """Return the actor of some device that is lent; None if there is none."""
        others = self._leases.of(REBUILDING)
        return next((self._actors[name] for name in self._actors if name not in others), None)

    async def lease(self, wish: Wish, pid: int) -> list[Lent]:
        """Wait for one device, and return it with what else is idle then.

        Args:
            pid: of the coordinator, on this machine.
        """
        self._coordinators.begin(wish.lease, pid)
        granted = self._granted[wish.lease] = asyncio.get_running_loop().create_future()
        try:
            if (wish.at_most > 1 or wish.follows) and self._taking_back:
                await asyncio.wait(list(self._taking_back.values()), timeout=IDLE_S)
            if wish.lease not in self._coordinators:
                return []  # it was ended meanwhile
            self._leases.ask(wish)
            self._grant()
            lent: list[Lent] = await granted
            return lent
        finally:
            self._granted.pop(wish.lease, None)

    async def more(self, wish: Wish) -> list[Lent]:
        """Return what a lease gets beyond what it has: idle devices, perhaps none."""
        if wish.lease not in self._coordinators:
            return []  # its coordinator died
        return self._lent(self._leases.take_idle(wish), wish.lease)

    async def give_back(self, name: str, lease: str) -> None:
        """Take back a device that has ended its part, or has died, unless another lease has it."""
        if name in self._leases.of(lease):
            self._take_back(name)

    async def end(self, lease: str, at_rest: bool = False) -> None:
        """End a lease: have its devices stopped, made empty, and lent again.

        Args:
            at_rest: there is nothing to be stopped.
        """
        self._coordinators.end(lease)
        self._leases.withdraw(lease)
        if (granted := self._granted.get(lease)) is not None and not granted.done():
            granted.set_result([])  # else its call would wait for ever, one of Ray's 1000
        for name in self._leases.of(lease):
            self._take_back(name, at_rest=at_rest)

    def _problem(self, name: str, described: Mapping[str, Any]) -> str:
        return self._versions.problem(name, described["models"], software=described["software"])

    def _free(self, name: str) -> None:
        self._leases.free(name)
        self._grant()

    def _grant(self) -> None:
        """Answer the leases that waited for what is idle now; each of them has a future."""
        for wish, names in self._leases.granted():
            self._granted[wish.lease].set_result(self._lent(names, wish.lease))

    def _lent(self, names: Sequence[str], lease: str) -> list[Lent]:
        return [
            Lent(
                name,
                self._actors[name],
                lease,
                sees_files=self._leases.sees_files(name),
                writes_files=name in self._writing,
            )
            for name in names
        ]

    def _abandoned(self, lease: str) -> None:
        """End a lease whose coordinator died."""
        self._begin(self.end(lease))

    def _take_back(self, name: str, *, at_rest: bool = False) -> None:
        """Have a device made empty and lent again, unless that is on its way."""
        if name not in self._taking_back:
            task = self._taking_back[name] = self._begin(self._taken_back(name, at_rest))
            task.add_done_callback(lambda _: self._taking_back.pop(name))

    async def _taken_back(self, name: str, at_rest: bool) -> None:
        """Make a device empty, as another process if this one cannot be, and lend it again."""
        while (actor := self._actors.get(name)) is not None:
            try:
                if not at_rest:
                    await actor.stop_all.remote()  # up to the next `empty`
                left_s: float | None = await asyncio.wait_for(actor.empty.remote(), ABANDON_S)
            except ActorDiedError as error:
                log.warning("device %s is gone for good: %s", name, error)
                await self.remove(name)
            except RayActorError:
                await asyncio.sleep(PAUSE_S)  # it is starting again
            except (TimeoutError, RayTaskError) as error:
                log.warning("device %s cannot be made empty, so it is killed: %r", name, error)
                ray.kill(actor, no_restart=False)
            else:
                self._have_graphs_dropped(name, actor, after_s=left_s)
                self._free(name)
                return

    def _have_graphs_dropped(self, name: str, actor: Any, *, after_s: float | None) -> None:
        """Have a device drop the graphs that it keeps for a later job, unless that comes before."""
        earlier = self._dropping.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if after_s is not None:
            self._dropping[name] = self._begin(_graphs_dropped(actor, after_s + PAUSE_S))

    def _rebuild(self, names: Sequence[str] = ()) -> None:
        """Begin to have devices build their models anew; all of them if none is named."""
        self._rebuilding = self._begin(self._rebuilt(names, after=self._rebuilding))

    async def _rebuilt(self, names: Sequence[str], *, after: asyncio.Task[None] | None) -> None:
        """Do so once an earlier reload has ended, first on those whose versions count."""
        if after is not None:
            await asyncio.wait([after])
        if not names:
            names = list(self._actors)
            self._versions = ModelVersions()
            self._files.forget()
        for writing in (True, False):
            some = [name for name in names if (name in self._writing) is writing]
            await asyncio.gather(*(self._rebuilt_on(name) for name in some))

    async def _rebuilt_on(self, name: str) -> None:
        """Start a device anew once it is idle, and lend it again if its models are the others'."""
        while self._leases.has(name) and not self._leases.take(name, REBUILDING):
            await asyncio.sleep(PAUSE_S)
        if (actor := self._actors.get(name)) is None:
            return
        try:
            described = await _restarted(actor)
        except ActorDiedError as error:
            log.warning("device %s is gone for good: %s", name, error)
            await self.remove(name)
            return
        problem = self._problem(name, described)
        if problem:
            log.warning("%s", problem)
            return
        self._free(name)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


async def _restarted(actor: Any) -> Mapping[str, Any]:
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


async def _graphs_dropped(actor: Any, after_s: float) -> None:
    await asyncio.sleep(after_s)
    with suppress(RayActorError):  # and so were they
        await actor.drop_idle_graphs.remote()
