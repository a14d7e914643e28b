"""How many requests a second one sender may make of this process.

There is a bucket for each owner, which holds four seconds' worth, so that a client may work in
bursts. A request whose token or session is nobody's counts as one of the address that it came from.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from gradbox.errors import TooManyRequests

BURST_S: Final = 4.0
# Senders that are remembered; a bucket that is forgotten is full again.
MAX_BUCKETS: Final = 10_000


@dataclass
class Bucket:
    """What is left of a sender's allowance, and when that was so."""

    left: float
    at_s: float


class RequestRate:
    """The buckets of all senders. Any thread may call it."""

    def __init__(self, requests_per_s: int) -> None:
        self._rate = requests_per_s
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, sender: str) -> None:
        """Take one request from a sender's bucket.

        Raises:
            TooManyRequests: it is empty.
        """
        now, full = time.monotonic(), self._rate * BURST_S
        with self._lock:
            bucket = self._buckets.pop(sender, None) or Bucket(full, now)
            self._buckets[sender] = bucket
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
            bucket.left = min(full, bucket.left + (now - bucket.at_s) * self._rate)
            bucket.at_s = now
            if bucket.left < 1.0:
                raise TooManyRequests(
                    f"you sent more than {self._rate} requests a second for {BURST_S:g} s: wait, "
                    f"put small jobs together, or ask the box's owner to raise --requests-per-s"
                )
            bucket.left -= 1.0
