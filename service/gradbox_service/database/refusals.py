"""Whether Redis refuses for now, so that waiting helps, or an error will meet us again.

    refuses for now                          why
    ───────────────────────────────────────  ────────────────────────────────────────────────────
    connection lost, timeout, LOADING        it restarts, or the network does
    MISCONF                                  its disk is full: it cannot append to its file
    OOM                                      its `maxmemory` is reached
    READONLY, MASTERDOWN, NOREPLICAS         a fail-over is under way
    EXECABORT because of one of these        the same, said of a whole transaction

Everything else (a wrong password, a wrong type, an unknown command) is an error of the set-up or of
ours. Whoever catches a `redis.RedisError` asks `store_refuses`, so that workers, the service and
`gradbox tokens` wait for the same things, and `why_refused` for what a person is to be told. What
can as well be done the next time stands in `unless_refused`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis

log = logging.getLogger(__name__)

_FAIL_OVER: Final = "is a replica, or has none: try again once its fail-over is over"
# How a server's reply begins, and what a person is told: a clause that goes on behind "Redis".
_SAYS: Final = {
    "MISCONF": "cannot write to its disk, which may be full: the box's owner is to make room there "
    "by hand (old logs, files in DATA/results)",
    "OOM": "has all the memory that it may: wait until jobs that ended make room, which takes a "
    "quarter of an hour, or have the box's owner give it more (--redis-memory-bytes)",
    "READONLY": _FAIL_OVER,
    "MASTERDOWN": _FAIL_OVER,
    "NOREPLICAS": _FAIL_OVER,
}
# What redis-py has a class of its own for; it takes the code off the reply.
_OF_THEIR_OWN: Final = {
    redis.OutOfMemoryError: "OOM",
    redis.ReadOnlyError: "READONLY",
    redis.exceptions.MasterDownError: "MASTERDOWN",
}
# redis-py puts the command before the reply of a pipeline; its arguments may say anything.
_OF_PIPELINE: Final = "of pipeline caused error: "
# How a server begins the reply to an EXEC that it refuses as a whole.
_OF_EXEC: Final = "Transaction discarded because of: "


def store_refuses(error: BaseException) -> bool:
    """Return whether Redis did not take a command only for now.

    Args:
        error: what redis-py raised.
    """
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return True
    return _code(error) in _SAYS


@contextmanager
def unless_refused(not_done: str = "", *of: object) -> Iterator[None]:
    """End the block, and not the caller, where Redis refuses for now; other errors come through.

    Args:
        not_done: what the log is to say then, a clause with a "%s" for each of `of`; "": nothing.
    """
    try:
        yield
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        if not_done:
            log.warning(f"{not_done}: Redis refuses for now: %s", *of, error)


def why_refused(error: BaseException) -> str:
    """Return why Redis refuses for now and what helps, a clause that goes on behind "Redis".

    Args:
        error: what `store_refuses` is true of.
    """
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "does not answer; try again in a few seconds"
    return _SAYS[_code(error)]


def _code(error: BaseException) -> str:
    """Return the code that the server's reply began with; "" for what is no reply."""
    for kind, code in _OF_THEIR_OWN.items():
        if isinstance(error, kind):
            return code
    if not isinstance(error, redis.ResponseError):
        return ""
    reply = str(error).rpartition(_OF_PIPELINE)[2].removeprefix(_OF_EXEC)
    return reply.partition(" ")[0]
