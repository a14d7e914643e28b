"""How long the box takes to do again what a fault stopped, as its users can see it."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from proofs.chaos.box import Box

LOOK_S = 0.1
GIVE_UP_S = 60.0
ANSWER_WITHIN_S = 5.0

BARS: Mapping[str, float] = {
    "device replaced": 6.0,
    "worker's job resumed": 25.0,
    "frozen worker's job resumed": 25.0,
    "service answering": 3.0,
    "whole box ready": 10.0,
}
"""The longest that each may take, in seconds."""


@dataclass
class Log:
    """What happened when, in seconds since the run began; printed as it happens if `verbose`."""

    verbose: bool
    lines: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def note(self, what: str) -> None:
        """Add a line."""
        self.lines.append(f"{time.monotonic() - self.began:6.1f} s  {what}")
        if self.verbose:
            print(self.lines[-1], flush=True)


@dataclass
class Recoveries:
    """Seconds by what recovered; alone is what no other fault came into."""

    log: Log
    alone: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    never: list[str] = field(default_factory=list)

    def add(self, what: str, seconds: float | None) -> None:
        """Note a recovery, or that there was none before patience was over."""
        if seconds is None:
            self.never.append(f"{what}: not within {GIVE_UP_S:.0f} s")
        else:
            self.alone[what].append(seconds)
            late = ", LATE" if seconds > BARS.get(what, math.inf) else ""
            self.log.note(f"{what} after {seconds:.2f} s{late}")

    def summary(self) -> list[dict[str, Any]]:
        """Return number, median, maximum and bar of everything that was measured."""
        return [
            {
                "what": what,
                "times": len(seconds),
                "median_s": round(statistics.median(seconds), 2),
                "max_s": round(max(seconds), 2),
                "bar_s": BARS.get(what),
                "late": sum(one > BARS.get(what, math.inf) for one in seconds),
            }
            for what, seconds in sorted(self.alone.items())
        ]


class Observer:
    """Looks at the box past the proxy, by the probes and by what users may ask of their jobs."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._http = {owner: box.http(owner, timeout_s=ANSWER_WITHIN_S) for owner in box.tokens}

    def close(self) -> None:
        for client in self._http.values():
            client.close()

    def jobs(self) -> list[dict[str, Any]]:
        """Return the newest jobs of all owners; fewer while the service does not answer."""
        found = []
        for client in self._http.values():
            with suppress(httpx.TransportError):
                answer = client.get("/v1/jobs", params={"limit": 20})
                if answer.is_success:
                    found += answer.json()["jobs"]
        return found

    def held_by(self, worker: str) -> dict[str, Any] | None:
        """Return the job that a worker runs."""
        for job in self.jobs():
            if job["state"] == "running" and job["worker"] == worker:
                return job
        return None

    def until_answering(self) -> float | None:
        """Return the seconds until the service lives and answers a user, on new connections."""
        return seconds_until(lambda: self._answers("/livez") and self._answers("/v1/jobs?limit=1"))

    def until_working(self, worker: str, *, since_s: float) -> float | None:
        """Return the seconds from a time until a job that the worker began after it gets on."""

        def works() -> bool:
            return any(
                job["worker"] == worker
                and (job["started_s"] or 0) > since_s
                and (job["progress"] is not None or job["state"] == "done")
                for job in self.jobs()
            )

        return _since(since_s, seconds_until(works))

    def until_resumed(self, job: Mapping[str, Any], *, since_s: float) -> float | None:
        """Return the seconds from a time until another attempt of a job gets on."""
        client = self._http[job["owner"]]

        def resumed() -> bool:
            try:
                answer = client.get(f"/v1/jobs/{job['id']}")
            except httpx.TransportError:
                return False
            view = answer.json() if answer.is_success else job
            again = view["attempts"] > job["attempts"] and view["progress"] is not None
            return bool(again or view["state"] in ("done", "failed", "cancelled"))

        return _since(since_s, seconds_until(resumed))

    def until_whole(self) -> float | None:
        """Return the seconds until every part runs and jobs can."""

        def whole() -> bool:
            found = self._box.processes()
            counts = {role: sum(p.role == role for p in found) for role in ("service", "valkey")}
            devices = {p.name for p in found if p.role == "device"}
            return (
                counts == {"service": 1, "valkey": 1}
                and len(devices) == self._box.num_workers
                and self._answers("/readyz")
            )

        return seconds_until(whole)

    def _answers(self, path: str) -> bool:
        token = next(iter(self._box.tokens.values()))
        try:
            answer = httpx.get(
                f"{self._box.url}{path}",
                headers={"Authorization": f"Bearer {token}"},
                timeout=ANSWER_WITHIN_S,
                trust_env=False,
            )
        except httpx.TransportError:
            return False
        return answer.is_success


def seconds_until(holds: Callable[[], bool]) -> float | None:
    """Return the seconds until a condition holds, or None when patience is over."""
    begin = time.monotonic()
    while time.monotonic() - begin < GIVE_UP_S:
        if holds():
            return time.monotonic() - begin
        time.sleep(LOOK_S)
    return None


def _since(since_s: float, seconds: float | None) -> float | None:
    return None if seconds is None else time.time() - since_s
