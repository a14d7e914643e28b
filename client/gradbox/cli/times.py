"""Times as people read them: durations, how long ago, and the clock of this place."""

from __future__ import annotations

import time
from typing import Final

MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86400


def duration(seconds: float) -> str:
    """Return a duration in two units at most: `4 s`, `3 min`, `1 h 04 min`, `2 d 5 h`."""
    whole = max(0, round(seconds))
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def brief(seconds: float) -> str:
    """Return how long something took, which may be less than a second: `21 ms`, `2.5 s`."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def ago(time_s: float, *, now_s: float | None = None) -> str:
    """Return how long ago a time was, given in seconds since 1970."""
    return f"{duration((time.time() if now_s is None else now_s) - time_s)} ago"


def local(time_s: float) -> str:
    """Return a time, given in seconds since 1970, by the clock of this place."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
