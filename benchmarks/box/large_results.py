"""What a large result costs: dense rows of 1.8 GB, an upload, outputs of 1 GB.

A box that `gradbox up` starts, with one worker on one thread of the CPU, used by a client that does
not see the box's folder, so that results are downloaded as from another machine.

    dense rows      W1, from submit to the opened result; beside it what the computation alone took
                    and one raw copy of as many bytes: a socket over loopback, SHA-256 on the way,
                    into a file
    download        those rows once more, from the job that is done
    upload          inputs of 1 GB, until the job is accepted
    outputs         a `Forward` of 1 GB: how much the device process grows, and how much it keeps

The raw copy is made right before or after what it stands beside, and both are medians.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from benchmarks.box.small_jobs import Costs, Meter, metered_box
from benchmarks.measure import timed
from benchmarks.page import MIB, section, table, verdicts
from benchmarks.per_sample.workloads import WORKLOADS
from gradbox import Forward, GradClient, PerSampleGradient

ROUNDS: Final = 3
CHUNK_BYTES: Final = MIB
UPLOAD_BYTES: Final = 2**30
OUTPUT_ROWS: Final = 64  # of a shard: its outputs take 1 MiB, and 1024 of them 1 GiB
OUTPUT_SHARDS: Final = 1024
MODELS: Final = """\
from torch import nn

def wide():
    return nn.Linear(4, 4096)

def first():
    return First()

class First(nn.Module):
    def forward(self, x):
        return x[:1]
"""


@dataclass(frozen=True)
class Beside:
    """Medians in seconds: through the box, and one raw copy of the same bytes."""

    num_bytes: int
    box_s: float
    raw_s: float


@dataclass(frozen=True)
class LargeResults:
    """What was measured; `load` is the machine's, of a minute."""

    dense: Costs
    dense_computation_s: float
    dense_bytes: int
    raw_s: float
    auto_s: float
    download: Beside
    upload: Beside
    output_bytes: int
    grown_bytes: int
    kept_bytes: int
    load: float


def measure_large_results() -> LargeResults:
    """Run the benchmark."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="gradbox-large-") as name:
        folder = Path(name)
        with _box(folder) as (client, meter):
            rows = _Rows(client, folder)
            rows.run("dense")  # the first job on a model verifies its plan
            raws, computations = [], []

            def dense() -> None:
                computations.append(rows.run("dense"))

            measured = []
            for _ in range(ROUNDS):
                raws.append(_raw_copy_s(rows.num_bytes, folder))
                measured.append(meter.measure(dense, 1))
            costs = Costs(
                [took for each in measured for took in each.times_ms],
                num_requests=statistics.mean(each.num_requests for each in measured),
                num_commands=statistics.mean(each.num_commands for each in measured),
                cpu_ms=measured[-1].cpu_ms,
            )
            rows.run("auto")
            auto_s = timed(lambda: rows.run("auto")).wall
            download = _beside(rows.download_s, rows.num_bytes, folder)
            upload = _beside(lambda: _upload_s(client), UPLOAD_BYTES, folder)
            grown, kept = _outputs(client, folder / "data")
    return LargeResults(
        dense=costs,
        dense_computation_s=statistics.median(computations),
        dense_bytes=rows.num_bytes,
        raw_s=statistics.median(raws),
        auto_s=auto_s,
        download=download,
        upload=upload,
        output_bytes=OUTPUT_SHARDS * MIB,
        grown_bytes=grown,
        kept_bytes=kept,
        load=os.getloadavg()[0],
    )


def large_results_section(found: LargeResults) -> str:
    """Describe the benchmark."""
    dense_s = found.dense.median_ms / 1e3
    least_s = found.dense_computation_s + found.raw_s
    roles = sorted(found.dense.cpu_ms)
    used = ", ".join(f"{role} {found.dense.cpu_ms[role] / 1e3:.1f} s" for role in roles)
    download = found.download.raw_s / found.download.box_s
    upload = found.upload.raw_s / found.upload.box_s
    grown, kept = found.grown_bytes / found.output_bytes, found.kept_bytes / found.output_bytes
    bars = [
        (dense_s <= 2 * least_s, f"dense rows in {dense_s / least_s:.2f} of that, allowed 2"),
        (upload >= 0.7, f"an upload at {upload:.2f} of the raw copy's speed, at least 0.7"),
        (download >= 0.8, f"a download at {download:.2f} of it, at least 0.8"),
        (grown <= 1.1, f"outputs grow the device process by {grown:.2f} of them, allowed 1.1"),
        (kept <= 0.1, f"and {kept:.2f} of them stay after the job"),
    ]
    rows = [
        _row("dense rows, submit to opened result", found.dense_bytes, dense_s, None),
        _row("their computation, by the receipt", 0, found.dense_computation_s, None),
        _row("one raw copy of them", found.dense_bytes, None, found.raw_s),
        _row('the same rows with form="auto"', 0, found.auto_s, None),
        *(
            _row(name, both.num_bytes, both.box_s, both.raw_s)
            for name, both in (("download", found.download), ("upload", found.upload))
        ),
    ]
    return section(
        "Large results",
        f"Medians of {ROUNDS}, in turn with a raw copy over loopback, hashed and written to a "
        f"file; one thread; load of the machine {found.load:.1f}.",
        table(["", "MiB", "through the box, s", "raw copy, s"], rows),
        f"The dense job takes {found.dense.num_requests:.0f} requests and "
        f"{found.dense.num_commands:.0f} Redis commands; CPU: {used}.",
        verdicts(bars),
    )


class _Rows:
    """The job of dense rows, W1."""

    def __init__(self, client: GradClient, folder: Path) -> None:
        self.num_bytes = 0
        self._client = client
        self._work = WORKLOADS["W1"]()
        self._target = folder / "rows.safetensors"
        self._dense = ""  # the newest job with dense rows

    def run(self, form: Literal["auto", "dense"]) -> float:
        """Run it to the opened result; returns the seconds of its computation."""
        work = self._work
        job = self._client.submit(
            PerSampleGradient(model="w1", inputs=[work.shard], loss=work.loss, form=form)
        )
        result = job.result()
        if form == "dense":
            self._dense = job.id
            self.num_bytes = sum(rows.nbytes for rows in result.grads.values())
        return result.manifest.seconds.samples

    def download_s(self) -> float:
        """Get the newest dense result once more, into a file; returns the seconds."""
        job = self._client.job(self._dense)
        self._target.unlink(missing_ok=True)  # the raw copy is a new file, too
        return timed(lambda: job.fetch(self._target)).wall


def _upload_s(client: GradClient) -> float:
    """Upload what the box has not seen, for a job that is next to nothing; returns the seconds."""
    given = torch.randn(UPLOAD_BYTES // 4)
    began = time.perf_counter()
    job = client.submit(Forward(model="first", inputs=[given]))
    took_s = time.perf_counter() - began
    job.result()
    return took_s


def _outputs(client: GradClient, data: Path) -> tuple[int, int]:
    """Return by how many bytes a `Forward` grew the device process, and how many stayed."""
    shards = [torch.randn(OUTPUT_ROWS, 4) for _ in range(OUTPUT_SHARDS)]
    client.submit(Forward(model="wide", inputs=shards[:2])).result()
    pid = device_pid(data)
    before = peak = anonymous_bytes(pid)
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, anonymous_bytes(pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        client.submit(Forward(model="wide", inputs=shards)).wait()
    finally:
        ended.set()
        watching.join()
    return peak - before, anonymous_bytes(pid) - before


def _beside(box_s: Callable[[], float], num_bytes: int, folder: Path) -> Beside:
    pairs = [(box_s(), _raw_copy_s(num_bytes, folder)) for _ in range(ROUNDS)]
    return Beside(
        num_bytes,
        statistics.median(ours for ours, _ in pairs),
        statistics.median(raw for _, raw in pairs),
    )


def _raw_copy_s(num_bytes: int, folder: Path) -> float:
    """Send a file over loopback, hash what comes and write it to another; returns the seconds."""
    source, target = folder / "raw-source", folder / "raw-target"
    with source.open("wb") as file:
        for _ in range(num_bytes // CHUNK_BYTES):
            file.write(os.urandom(CHUNK_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            with connection, source.open("rb") as file:
                connection.sendfile(file)

        sending = threading.Thread(target=send)
        sending.start()
        began = time.perf_counter()
        digest, chunk = hashlib.sha256(), bytearray(CHUNK_BYTES)
        with socket.create_connection(server.getsockname()) as receiving, target.open("wb") as file:
            while length := receiving.recv_into(chunk):
                piece = memoryview(chunk)[:length]
                digest.update(piece)
                file.write(piece)
        took_s = time.perf_counter() - began
        sending.join()
    source.unlink()
    target.unlink()
    return took_s


def _box(folder: Path) -> AbstractContextManager[tuple[GradClient, Meter]]:
    source = folder / "large_models.py"
    source.write_text(MODELS)
    registered = "".join(
        f'[models.{name}]\nbuilder = "python"\nsource = "{source}:{name}"\n'
        for name in ("wide", "first")
    )
    registered += (
        '[models.w1]\nbuilder = "python"\nsource = "benchmarks.per_sample.workloads:model"\n'
        'kwargs = {name = "W1"}\n'
    )
    return metered_box(folder, registered=registered)


def device_pid(data: Path) -> int:
    """Return the process of the box that has a model loaded: the device process."""
    return max(
        (
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if (folder / "comm").read_text().strip() == "gradbox-device"
            and str(data) in (folder / "cmdline").read_text()
        ),
        key=anonymous_bytes,
    )


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


def _row(what: str, num_bytes: int, box_s: float | None, raw_s: float | None) -> list[str]:
    size = f"{num_bytes / MIB:.0f}" if num_bytes else ""
    return [what, size, *("" if s is None else f"{s:.2f}" for s in (box_s, raw_s))]
