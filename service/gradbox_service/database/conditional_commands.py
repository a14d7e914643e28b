"""Commands that Redis runs together, if some keys hold what the caller has read.

It is what WATCH, MULTI and EXEC do, in one round trip: a change of a record is sent as one script.

Redis refuses what takes memory once it has as much as it may (`maxmemory`). What is done of jobs
that were accepted is to be done all the same: they beat, end and are forgotten, which makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import redis
from redis.client import Pipeline

Made = TypeVar("Made")

# KEYS: keys of strings. ARGV: what each of them must hold, "" for one that must not be there; then
# each command as the number of its words, and the words. One that begins with IF_ONE runs if the
# command before it answered 1. A SET with NX that finds its key there ends them, so it comes first.
SCRIPT: Final = """
for i, key in ipairs(KEYS) do
    if (redis.call('GET', key) or '') ~= ARGV[i] then return 0 end
end
local at, answer = #KEYS + 1, nil
while at <= #ARGV do
    local last = at + tonumber(ARGV[at])
    local name = ARGV[at + 1]
    if string.sub(name, 1, 1) ~= '?' then
        answer = redis.call(unpack(ARGV, at + 1, last))
        if not answer then return 0 end
    elseif answer == 1 then
        redis.call(string.sub(name, 2), unpack(ARGV, at + 2, last))
    end
    at = last + 1
end
return 1
"""

IF_ONE: Final = "?"
# How a script begins that Redis runs although it has as much memory as it may.
OVER_BOUND: Final = "#!lua flags=allow-oom\n"


@dataclass(frozen=True)
class Beside:
    """What is written together with a record.

    Attributes:
        write: adds it to the commands.
        where: what else must hold, as for `ConditionalCommands.run`.
    """

    write: Callable[[Pipeline], None] = lambda _: None
    where: Mapping[str, bytes | str] = field(default_factory=dict)


class Outdated(Exception):
    """What was to be written beside a record follows from what has changed since it was read."""


def until_current(attempt: Callable[[], Made]) -> Made:
    """Call again as long as what the call has read is outdated once it writes."""
    while True:
        with suppress(Outdated):
            return attempt()


class ConditionalCommands:
    """Runs what a pipeline has gathered, or nothing of it."""

    def __init__(self, connection: redis.Redis, *, over_bound: bool = False) -> None:
        """Send nothing yet.

        Args:
            over_bound: whether to run them also where Redis has as much memory as it may.
        """
        self._script = connection.register_script(OVER_BOUND + SCRIPT if over_bound else SCRIPT)

    def run(self, pipe: Pipeline, *, where: Mapping[str, bytes | str]) -> bool:
        """Run a pipeline's commands where keys hold these values; return whether they do.

        A script whose answer is lost may be sent again, and then finds its own changes: the
        conditions must not hold after the commands.

        Args:
            where: key → the string that it must hold, "" if it must not be there.
        """
        words: list[object] = list(where.values())
        for command in _strings_together([command for command, _ in pipe.command_stack]):
            words += [len(command), *command]
        pipe.reset()
        return bool(self._script(keys=list(where), args=cast("list[str]", words)))


def _strings_together(commands: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return commands with one MSET, at the end, for all that set a string and nothing else.

    A key that is set so must be in no other of them.
    """
    strings = [command[1:] for command in commands if command[0] == "SET" and len(command) == 3]
    others = [c for c in commands if c[0] != "SET" or len(c) != 3]
    return [*others, ["MSET", *(word for pair in strings for word in pair)]] if strings else others
