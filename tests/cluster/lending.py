"""A pool with devices of its own, and what it lends: `python -m tests.cluster.lending FOLDER`.

Prints as JSON how many devices a lease gets: after one could not be made empty; after models were
changed while they were read again, and were read again once more; after a device joined that had
begun before that. The log goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from gradbox_worker.cluster.head import ray_environment
from gradbox_worker.device import DeviceSettings

DEADLINE_S = 20.0
MODELS = """
from torch import nn
from tests.case_models import seeded

@seeded
def later():
    return nn.Linear(5, {width})
"""


class NeverEmpty:
    """A device whose first process fails to put its model back."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def stop_all(self) -> None:
        pass

    def empty(self) -> None:
        if not self._mark.exists():
            self._mark.touch()
            raise RuntimeError("it cannot be put back")


class Lending:
    """The pool of a head, whose devices are leased by this process."""

    def __init__(self, folder: Path) -> None:
        from gradbox_worker.cluster.head import ray_session

        ray_session.start_here(
            namespace="lending", folder=ray_session.new_folder(folder), num_cpus=4
        )
        import ray

        from gradbox_worker.cluster.head.head import Head
        from gradbox_worker.cluster.head.pool import POOL

        self._ray, self.folder = ray, folder
        self.write_model(width=1)
        entry = '[models.later]\nbuilder = "python"\nsource = "later.py:later"\n'
        (folder / "models.toml").write_text(entry)
        self.settings = DeviceSettings(folder / "models.toml", folder, device="cpu")
        self.head = Head(self.settings, devices=["cpu", "cpu"], mark=folder / "mark")
        self.head.start(stopping=threading.Event())
        self._pool = ray.get_actor(POOL)

    def close(self) -> None:
        """End Ray and what runs on it."""
        from gradbox_worker.cluster.head import ray_session

        ray_session.leave()
        ray_session.remove_folder(self.folder)

    def asked(self, name: str, *arguments: Any) -> Any:
        """Return what a method of the pool does."""
        return self._ray.get(getattr(self._pool, name).remote(*arguments))

    def num_lent(self, *, wanted: int) -> int:
        """Return how many devices a lease gets, once it gets so many; or after a while."""
        from gradbox_worker.cluster.head.leases import LeaseRequest

        deadline = time.monotonic() + DEADLINE_S
        while True:
            lease = uuid.uuid4().hex
            found = len(self.asked("lease", LeaseRequest(lease, "", at_most=9), os.getpid()))
            self.asked("end", lease)
            if found >= wanted or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def write_model(self, *, width: int) -> None:
        """Write another version of the model."""
        (self.folder / "later.py").write_text(MODELS.format(width=width))

    def after_a_change_while_models_were_read(self) -> int:
        """Return how many of two devices are leased, of which one read the model late."""
        from gradbox_worker.cluster.head.leases import LeaseRequest

        self.asked("have_models", 0)
        _, other = self.asked("lease", LeaseRequest("both", "", at_most=2), os.getpid())
        before = self._process_of(other)
        self.write_model(width=2)
        reading = self._pool.have_models.remote(1)
        self.asked("give_back", other.name, "both")
        while self._process_of(other) in (before, None):
            time.sleep(0.1)
        self.write_model(width=4)
        self.asked("end", "both")
        self._ray.get(reading)
        assert self.num_lent(wanted=1) == 1
        self.asked("have_models", 2)
        return self.num_lent(wanted=2)

    def _process_of(self, leased: Any) -> int | None:
        """Return the process of a device, or None if it is being started."""
        try:
            return int(self._ray.get(leased.actor.describe.remote())["process"])
        except self._ray.exceptions.RayActorError:
            return None

    def after_one_joined_that_began_earlier(self) -> int:
        """Return how many of three devices are leased, of which one began with an older model."""
        from gradbox_worker.cluster.actor.device_actor import CONTROL, ROWS, DeviceActor

        groups = {CONTROL: 1, ROWS: 1}
        remote = self._ray.remote(max_restarts=-1, concurrency_groups=groups)(DeviceActor)
        actor = remote.options(num_cpus=0).remote(self.settings, (self.folder / "mark", ""), None)
        described = self._ray.get(actor.describe.remote())
        self.write_model(width=6)
        reading = self._pool.have_models.remote(3)
        assert self.asked("add", "late", actor, described, False) == ""
        self._ray.get(reading)
        self.asked("have_models", 3)
        return self.num_lent(wanted=3)

    def after_one_was_not_made_empty(self) -> int:
        """Return how many of three devices are leased after one has failed."""
        described = self._ray.get(self.asked("any_device").describe.remote())
        remote = self._ray.remote(max_restarts=-1)(NeverEmpty)
        failing = remote.options(num_cpus=0).remote(self.folder / "failed")
        self.asked("add", "failing", failing, described, False)
        assert self.num_lent(wanted=3) == 3
        found = self.num_lent(wanted=3)
        self.asked("remove", "failing")
        return found


def main(folder: Path) -> dict[str, int]:
    logging.basicConfig()
    ray_environment.start_here(secrets.token_hex(32))
    lending = Lending(folder)
    try:
        return {
            "not made empty": lending.after_one_was_not_made_empty(),
            "changed meanwhile": lending.after_a_change_while_models_were_read(),
            "began earlier": lending.after_one_joined_that_began_earlier(),
        }
    finally:
        lending.head.look()
        lending.close()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
