"""Makes the devices empty that a lease had, so that they can be leased again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

log = logging.getLogger(__name__)

# After its coordinator's death a device may take so long to come to its next shard.
ABANDON_S: Final = 30.0
PAUSE_S: Final = 0.25


class Emptying:
    """The devices that are being made empty, and those that keep graphs; in one event loop."""

    def __init__(
        self,
        actors: Mapping[str, Any],
        *,
        emptied: Callable[[str], None],
        died: Callable[[str], None],
    ) -> None:
        """Make none empty yet.

        Args:
            actors: those of all devices, by name, as they are at any time.
            emptied: called with the name of a device that can be leased again.
            died: called with the name of one that Ray does not start again.
        """
        self._actors = actors
        self._emptied = emptied
        self._died = died
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._dropping: dict[str, asyncio.Task[None]] = {}  # by device: graphs that wait too long

    def begin(self, name: str, *, at_rest: bool = False) -> None:
        """Have a device made empty, unless that is on its way.

        Args:
            at_rest: there is nothing to be stopped.
        """
        if name not in self._under_way:
            task = asyncio.get_running_loop().create_task(self._empty(name, at_rest))
            self._under_way[name] = task
            task.add_done_callback(lambda _: self._under_way.pop(name))

    async def wait(self, timeout_s: float) -> None:
        """Wait for those that are being made empty now."""
        if self._under_way:
            await asyncio.wait(list(self._under_way.values()), timeout=timeout_s)

    async def _empty(self, name: str, at_rest: bool) -> None:
        """Make a device empty, as another process if this one cannot be."""
        while (actor := self._actors.get(name)) is not None:
            try:
                if not at_rest:
                    await actor.stop_all.remote()  # up to the next `empty`
                left_s: float | None = await asyncio.wait_for(actor.empty.remote(), ABANDON_S)
            except ActorDiedError as error:
                log.warning("device %s is gone for good: %s", name, error)
                self._died(name)
            except RayActorError:
                await asyncio.sleep(PAUSE_S)  # it is starting again
            except (TimeoutError, RayTaskError) as error:
                log.warning("device %s cannot be made empty, so it is killed: %r", name, error)
                ray.kill(actor, no_restart=False)
            else:
                self._drop_graphs(name, actor, after_s=left_s)
                self._emptied(name)
                return

    def _drop_graphs(self, name: str, actor: Any, *, after_s: float | None) -> None:
        """Have a device drop the graphs that it keeps for a later job, unless that comes before."""
        earlier = self._dropping.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if after_s is not None:
            dropped = _graphs_dropped(actor, after_s + PAUSE_S)
            self._dropping[name] = asyncio.get_running_loop().create_task(dropped)


async def _graphs_dropped(actor: Any, after_s: float) -> None:
    await asyncio.sleep(after_s)
    with suppress(RayActorError):  # and so were they
        await actor.drop_idle_graphs.remote()
