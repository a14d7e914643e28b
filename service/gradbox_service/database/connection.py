"""The one place that knows how gradbox talks to Redis."""

from __future__ import annotations

import re

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from gradbox_service.settings import BadSettings

# How long one answer may take. Blocking reads ask for less than this.
SOCKET_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# The pause between two tries grows to this.
RETRY_PAUSE_S = 0.5
# Retries of what a running job reads, which waits for a Redis that restarts: two minutes at least.
PATIENT = 240


def connect(url: str, *, retries: int = 3, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """Return a client of the Redis at `url` (redis://, rediss:// or unix://).

    Nothing is sent before the first command. The client answers in bytes, as RQ needs it, and in
    RESP2, so that answers have one shape whatever the version of redis-py.

    Args:
        retries: how often a command is sent again when the connection breaks.
        timeout_s: how long one answer may take.

    Raises:
        BadSettings: the URL has none of the three schemes, or its port is none.
    """
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=RETRY_PAUSE_S, base=0.05), retries=retries),
        )
    except ValueError as error:
        shown = re.sub("//.*@", "//…@", url)  # without its password
        raise BadSettings(
            f"expected the address of a Redis such as redis://127.0.0.1:6379, got {shown!r}: "
            f"{error}; name another one by --redis-url or GRADBOX_REDIS_URL"
        ) from None
