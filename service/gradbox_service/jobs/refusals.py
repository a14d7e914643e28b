"""Whether Redis refuses for now, so that waiting helps, or an error will meet us again.

    refuses for now                          why
    ───────────────────────────────────────  ────────────────────────────────────────────────────
    connection lost, timeout, LOADING        it restarts, or the network does
    MISCONF                                  its disk is full: it cannot append to its file
    OOM                                      its `maxmemory` is reached
    READONLY, MASTERDOWN, NOREPLICAS         a fail-over is under way
    EXECABORT because of one of these        the same, said of a whole transaction

Everything else (a wrong password, a wrong type, an unknown command) is an error of the set-up or of
ours. Whoever catches a `redis.RedisError` asks this one function, so that workers, the service and
`gradbox tokens` wait for the same things.
"""

from __future__ import annotations

from typing import Final

import redis

# What redis-py has no class of its own for; the server's reply begins with the code.
_CODES: Final = frozenset({"MISCONF", "OOM", "READONLY", "MASTERDOWN", "NOREPLICAS"})
# What it has a class for; it takes the code off the reply.
_OF_THEIR_OWN: Final = (
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    redis.exceptions.MasterDownError,
)
# redis-py puts the command before the reply of a pipeline; its arguments may say anything.
_OF_PIPELINE: Final = "of pipeline caused error: "
# How a server begins the reply to an EXEC that it refuses as a whole.
_OF_EXEC: Final = "Transaction discarded because of: "


def store_refuses(error: BaseException) -> bool:
    """Tell whether Redis did not take a command only for now.

    Args:
        error: what redis-py raised.
    """
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return True
    if isinstance(error, _OF_THEIR_OWN):
        return True
    if not isinstance(error, redis.ResponseError):
        return False
    reply = str(error).rpartition(_OF_PIPELINE)[2].removeprefix(_OF_EXEC)
    return reply.partition(" ")[0] in _CODES
