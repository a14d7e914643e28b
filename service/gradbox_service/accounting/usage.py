"""What each owner used of the box, by the hour, and when each worker was busy, by the minute.

    gradbox:charges        list of what is in no sum yet: (hash, field, amount) of each, as JSON
    gradbox:usage:HOUR     hash: `ms:`, `bytes:` and `jobs:OWNER`
    gradbox:busy:MINUTE    hash: worker → milliseconds

An attempt is charged once, in the transaction that ends it, however it ends: done, failed,
cancelled, lost, given back. That appends one charge to a list. The service process that leads adds
up what is in the list once a second, and whoever reads the sums does so first.

An attempt's device seconds are those in which a worker held it, spread over the hours that it ran
in. The bytes of a result count in the hour in which the job ended, and so does the job.

What a change of a record costs is worked out in `jobs.charges`. Amounts are whole milliseconds and
bytes, so that sums are exact.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol, cast

import redis
from redis.client import Pipeline

from gradbox_service.database.conditional_commands import ConditionalCommands

MINUTE_S: Final = 60
HOUR_S: Final = 3600
# Charges by the hour are kept for a month and some days, those by the minute for what is shown.
HOURS_KEPT: Final = 35 * 24
MINUTES_KEPT: Final = 120
CHARGES: Final = "gradbox:charges"
ADDED_UP: Final = "gradbox:charges:added-up"  # how many ever were


@dataclass(frozen=True)
class Used:
    """An amount of use."""

    device_ms: int = 0
    result_bytes: int = 0
    num_jobs: int = 0

    def __add__(self, other: Used) -> Used:
        return Used(
            self.device_ms + other.device_ms,
            self.result_bytes + other.result_bytes,
            self.num_jobs + other.num_jobs,
        )


@dataclass(frozen=True)
class Charge:
    """What one attempt costs its owner, by hours since 1970, and how it kept its worker busy.

    `busy_ms` is by minutes since 1970.
    """

    owner: str
    worker: str | None = None
    by_hour: Mapping[int, Used] = field(default_factory=dict)
    busy_ms: Mapping[int, int] = field(default_factory=dict)


UsedByHour = Mapping[int, Mapping[str, Used]]
BusyByWorker = Mapping[str, Mapping[int, int]]


class Usage:
    """What was charged so far: one hash an hour and one a minute, both of which expire.

    Hours and minutes count from 1970; both ends are included.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._commands = ConditionalCommands(connection, over_bound=True)

    def by_hour(self, first: int, last: int) -> UsedByHour:
        """Return, by hour, what each owner used; hours without use are left out."""
        found: dict[int, dict[str, Used]] = {}
        for hour, fields in self._hashes(_hour_key, first, last):
            owners = found.setdefault(hour, {})
            for name, value in fields.items():
                kind, _, owner = name.decode().partition(":")
                if kind in _FIELDS:
                    more = Used(**{_FIELDS[kind]: int(value)})
                    owners[owner] = owners.get(owner, Used()) + more
        return found

    def busy_ms(self, first: int, last: int) -> BusyByWorker:
        """Return, by worker and minute, for how many milliseconds it held a job."""
        found: dict[str, dict[int, int]] = {}
        for minute, fields in self._hashes(_minute_key, first, last):
            for worker, value in fields.items():
                found.setdefault(worker.decode(), {})[minute] = int(value)
        return found

    def add_up(self) -> None:
        """Add the charges in the list to the sums, and have those expire in time."""
        with self._redis.pipeline() as reading:
            reading.get(ADDED_UP)
            reading.lrange(CHARGES, 0, -1)
            before, texts = reading.execute()
        if not texts:
            return
        sums = Counter[tuple[str, str]]()
        for key, name, amount in chain.from_iterable(map(json.loads, texts)):
            sums[key, name] += amount
        pipe = self._redis.pipeline()
        for (key, name), amount in sums.items():
            pipe.hincrby(key, name, amount)
        for key in {key for key, _ in sums}:
            is_hour = key.startswith(_hour_key(""))
            pipe.expire(key, HOURS_KEPT * HOUR_S if is_hour else MINUTES_KEPT * MINUTE_S)
        pipe.ltrim(CHARGES, len(texts), -1)
        # Whoever has read the same, and comes later, finds another number.
        pipe.set(ADDED_UP, int(before or 0) + len(texts))
        self._commands.run(pipe, where={ADDED_UP: before or ""})

    def _hashes(
        self, key: _Key, first: int, last: int
    ) -> Iterable[tuple[int, Mapping[bytes, bytes]]]:
        self.add_up()
        numbers = range(first, last + 1)
        with self._redis.pipeline(transaction=False) as pipe:
            for number in numbers:
                pipe.hgetall(key(number))
            answers = cast("list[Mapping[bytes, bytes]]", pipe.execute())
        return [pair for pair in zip(numbers, answers, strict=True) if pair[1]]


def write(pipe: Pipeline, charge: Charge) -> None:
    """Charge an attempt by a transaction of the caller's."""
    amounts = [
        (_hour_key(hour), f"{kind}:{charge.owner}", getattr(used, attribute))
        for hour, used in charge.by_hour.items()
        for kind, attribute in _FIELDS.items()
    ]
    if charge.worker is not None:
        amounts += [(_minute_key(m), charge.worker, busy) for m, busy in charge.busy_ms.items()]
    pipe.rpush(CHARGES, json.dumps([amount for amount in amounts if amount[2]]))


def add_use(hours: dict[int, dict[str, Used]], charge: Charge) -> None:
    for hour, used in charge.by_hour.items():
        owners = hours.setdefault(hour, {})
        owners[charge.owner] = owners.get(charge.owner, Used()) + used


def add_busy(workers: dict[str, dict[int, int]], charge: Charge) -> None:
    if charge.worker is not None:
        minutes = workers.setdefault(charge.worker, {})
        for minute, busy in charge.busy_ms.items():
            minutes[minute] = minutes.get(minute, 0) + busy


def spread(began_s: float, ended_s: float, *, width_s: int) -> dict[int, int]:
    """Return how many milliseconds of a time fall into each interval of `width_s`."""
    began, ended, width = int(began_s * 1000), int(ended_s * 1000), width_s * 1000
    found: dict[int, int] = {}
    while began < ended:
        number = began // width
        until = min(ended, (number + 1) * width)
        found[number] = until - began
        began = until
    return found


def _hour_key(hour: int | str) -> str:
    return f"gradbox:usage:{hour}"


def _minute_key(minute: int) -> str:
    return f"gradbox:busy:{minute}"


class _Key(Protocol):
    def __call__(self, number: int, /) -> str: ...


_FIELDS: Final = {"ms": "device_ms", "bytes": "result_bytes", "jobs": "num_jobs"}
