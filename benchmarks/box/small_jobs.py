"""What a small job costs around its computation: requests, Redis commands, time of each process.

A box that `gradbox up` starts, with one worker on the CPU and a model of 50 parameters, used by a
client in this process. Three things are measured:

    one job at a time       `client.run`, and `submit` with `result`, each with new inputs
    200 jobs at once        from one client thread, and from 16
    a training loop         100 steps of a remote model, forward on the box, a loss here, backward
                            on the box, and an optimizer that changes every weight

Redis commands are what its `commandstats` counts, those within scripts too, less what an idle box
sends in the same time. Processor time is of each process of the box and of this one. Nothing is
measured before the box has gone quiet: the process that waits to take a dead device's place takes
seconds of processor time to import what it may need.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import redis
import torch
from torch import nn

from benchmarks.measure import median_ms, timed
from benchmarks.page import section, table, verdicts
from gradbox import GradClient, Gradient
from gradbox_worker.demo.box import running_box

MODEL: Final = """\
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
"""
WARM_UP: Final = 20
IDLE_S: Final = 3.0
# A box is quiet once all of it together takes this share of a core for a second.
QUIET_SHARE: Final = 0.1
QUIET_WITHIN_S: Final = 120.0
AT_ONCE: Final = 200
THREADS: Final = 16
ROLES: Final = {
    "gradbox_service": "service",
    "gradbox_worker.turns.main": "device",
    "gradbox_worker": "worker",
    "valkey": "Redis",
}


@dataclass(frozen=True)
class Costs:
    """Of one call: milliseconds of wall time, requests, Redis commands, CPU ms by process.

    `num_bytes` are those of requests and answers, with their headers.
    """

    times_ms: list[float]
    num_requests: float
    num_commands: float
    cpu_ms: dict[str, float]
    num_bytes: float = 0.0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def p95_ms(self) -> float:
        return sorted(self.times_ms)[int(0.95 * len(self.times_ms))]


@dataclass(frozen=True)
class SmallJobs:
    """What was measured; `load` is the machine's, of a minute."""

    run: Costs
    submit: Costs
    steps: Costs
    local_step_ms: float
    rate_one: float  # jobs a second
    rate_many: float
    load: float


@dataclass
class Meter:
    """Counts requests of this process and their bytes, and reads counters of the box."""

    connection: redis.Redis
    data: Path
    idle_per_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    def measure(self, call: Callable[[], object], times: int) -> Costs:
        """Call so often, one after the other."""
        before, cpu, requests = self.commands(), self.cpu_ms(), self.requests.total()
        num_bytes = self.num_bytes
        took = [1e3 * timed(call).wall for _ in range(times)]
        idle = self.idle_per_s * sum(took) / 1e3
        after = self.cpu_ms()
        return Costs(
            times_ms=took,
            num_requests=(self.requests.total() - requests) / times,
            num_commands=(self.commands() - before - idle) / times,
            cpu_ms={role: (after[role] - cpu.get(role, 0.0)) / times for role in after},
            num_bytes=(self.num_bytes - num_bytes) / times,
        )

    def rest(self) -> None:
        """Wait until the box is quiet, and learn what it sends to Redis then."""
        give_up = time.monotonic() + QUIET_WITHIN_S
        busy_ms = float("inf")
        while busy_ms > QUIET_SHARE * 1e3 and time.monotonic() < give_up:
            cpu = self.cpu_ms()
            time.sleep(1.0)
            busy_ms = sum(self.cpu_ms().values()) - sum(cpu.values())
        before = self.commands()
        time.sleep(IDLE_S)
        self.idle_per_s = (self.commands() - before) / IDLE_S

    def commands(self) -> int:
        stats: dict[str, Any] = self.connection.info("commandstats")
        return sum(entry["calls"] for name, entry in stats.items() if name != "cmdstat_info")

    def cpu_ms(self) -> dict[str, float]:
        """Return the processor time of each process of the box, and of this one."""
        found: dict[str, float] = {"client": cpu_ms(os.getpid())}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                role = next((r for name, r in ROLES.items() if name in command), None)
                if role is not None and str(self.data) in command:
                    found[role] = found.get(role, 0.0) + cpu_ms(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found


def measure_small_jobs(*, num_jobs: int = 200, num_steps: int = 100) -> SmallJobs:
    """Run the benchmark."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gradbox-small-") as name:
        source = Path(name) / "model.py"
        source.write_text(MODEL)
        registered = f'[models.tiny]\nbuilder = "python"\nsource = "{source}:tiny"\n'
        with metered_box(Path(name), registered=registered) as (client, meter):
            return _measured(client, meter, num_jobs, num_steps)


def _measured(client: GradClient, meter: Meter, num_jobs: int, num_steps: int) -> SmallJobs:
    for _ in range(WARM_UP):
        client.run(_job())
        client.submit(_job()).result()
    meter.rest()
    run = meter.measure(lambda: client.run(_job()), num_jobs)
    submit = meter.measure(lambda: client.submit(_job()).result(), num_jobs)
    rate_one = _rate(lambda jobs: [job.result() for job in list(map(client.submit, jobs))])
    with ThreadPoolExecutor(THREADS) as pool:
        rate_many = _rate(lambda jobs: list(pool.map(client.run, jobs)))
    remote, local = _training(client), _local_training()
    for _ in range(5):
        remote()
    return SmallJobs(
        run=run,
        submit=submit,
        steps=meter.measure(remote, num_steps),
        local_step_ms=median_ms(local, num_steps),
        rate_one=rate_one,
        rate_many=rate_many,
        load=os.getloadavg()[0],
    )


def small_jobs_section(found: SmallJobs) -> str:
    """Describe the benchmark."""
    roles = sorted(found.run.cpu_ms)
    rows = [
        _row("`run`", found.run, roles),
        _row("`submit`, `result`", found.submit, roles),
        _row("a step of a remote model", found.steps, roles),
    ]
    beyond_ms = found.steps.median_ms - found.local_step_ms
    per_half = found.steps.num_requests / 2
    bars = [
        (found.submit.num_requests <= 2, "a small job takes 2 requests at most"),
        (found.run.num_commands <= 30, "and 30 Redis commands"),
        (found.run.median_ms <= 10, "its median is within 10 ms"),
        (found.run.p95_ms <= 20, "its 95th percentile is within 20 ms"),
        (found.rate_one >= 150, f"{AT_ONCE} at once: 150 jobs/s from one thread"),
        (found.rate_many >= found.rate_one, f"no slower from {THREADS} threads"),
        (per_half <= 2, "a step of a remote model takes 2 requests for each half"),
        (beyond_ms <= 20, f"and {beyond_ms:.1f} ms beyond its computation, allowed 20"),
    ]
    head = ["one at a time", "median ms", "p95 ms", "requests", "Redis commands"]
    return section(
        "Small jobs",
        "One worker on the CPU, a model of 50 parameters, over loopback; load of the machine "
        f"{found.load:.1f}.",
        table([*head, *(f"{role}, CPU ms" for role in roles)], rows),
        f"{AT_ONCE} at once: {found.rate_one:.0f} jobs/s from one thread, "
        f"{found.rate_many:.0f} from {THREADS}. The same step on a local model takes "
        f"{found.local_step_ms:.1f} ms.",
        verdicts(bars),
    )


@contextmanager
def metered_box(
    folder: Path, *, registered: str | None = None
) -> Iterator[tuple[GradClient, Meter]]:
    """Run a box; give a client of it, whose requests are counted, and the meter of both."""
    with running_box(folder, registered=registered) as (url, token):
        (socket,) = (folder / "data").rglob("*.sock")
        meter = Meter(redis.Redis(unix_socket_path=str(socket)), folder / "data")
        transport = Counted(meter)
        with GradClient(url=url, token=token, transport=transport) as client:
            yield client, meter


class Counted(httpx.HTTPTransport):
    """Counts the requests that it sends, and the bytes of these and of their answers."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        request.stream = CountedStream(request.stream, self._meter)
        answer = super().handle_request(request)
        assert isinstance(answer.stream, httpx.SyncByteStream)
        answer.stream = CountedStream(answer.stream, self._meter)
        self._meter.requests[request.method] += 1
        for headers in (request.headers, answer.headers):
            self._meter.num_bytes += sum(len(name) + len(text) + 4 for name, text in headers.raw)
        return answer


class CountedStream(httpx.SyncByteStream):
    """A body whose bytes are counted as they pass."""

    def __init__(self, stream: httpx.SyncByteStream, meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._meter.num_bytes += len(piece)
            yield piece

    def close(self) -> None:
        self._stream.close()


def _job() -> Gradient:
    return Gradient(model="tiny", inputs=[torch.randn(3, 5)], loss=lambda z: (z * z).sum())


def _rate(run: Callable[[list[Gradient]], object]) -> float:
    jobs = [_job() for _ in range(AT_ONCE)]
    return AT_ONCE / timed(lambda: run(jobs)).wall


def _training(client: GradClient) -> Callable[[], None]:
    """Return a step that changes every weight, as an optimizer does."""
    model = client.model("tiny", mode="train")
    weights = {name: p.detach().clone() for name, p in _tiny().named_parameters()}
    model.weights = weights

    def step() -> None:
        model.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        for name, gradient in model.grads.items():
            weights[name] -= 0.01 * gradient

    return step


def _local_training() -> Callable[[], None]:
    model = _tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()

    return step


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def _row(what: str, costs: Costs, roles: list[str]) -> list[str]:
    return [
        what,
        f"{costs.median_ms:.1f}",
        f"{costs.p95_ms:.1f}",
        f"{costs.num_requests:.1f}",
        f"{costs.num_commands:.0f}",
        *(f"{costs.cpu_ms.get(role, 0.0):.1f}" for role in roles),
    ]


def cpu_ms(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")
