"""A job is one trace of OpenTelemetry through all processes, where an endpoint is set."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gradbox import Forward, GradClient
from gradbox.spans import Spans, read_traceparent
from gradbox_worker.computations.phases import MODEL_LOAD, WRITE_RESULT, PhaseClock
from tests.boxes import ROOT, TestBox, running_box
from tests.worker import zoo

DEADLINE_S = 60.0
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

SUBMITS_ONE_JOB = """
import sys
import torch
from gradbox import GradClient, Gradient
shards = [torch.ones(100_000, 3) * k for k in range(3)]  # too large to go with the job
job = Gradient(model="m", inputs=shards, loss=lambda z: (z * z).sum(), mode="train", retain=0)
with GradClient(*sys.argv[1:]) as client:
    job = client.submit(job)
    job.wait(progress=False)  # which does not ask for the result
    job.result(progress=False)
"""

# Without torch, to be quick.
RUNS_THE_MODEL = """
import sys
import numpy as np
from gradbox import Forward, GradClient
with GradClient(*sys.argv[1:]) as client:
    client.submit(Forward(model="mlp", inputs=[np.ones((2, 5))])).result(progress=False)
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


@dataclass(frozen=True)
class Received:
    """A span, as the collector received it."""

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    service: str
    began_ns: int
    ended_ns: int


class Collector:
    """A collector of OTLP over HTTP that keeps what it is sent."""

    def __init__(self) -> None:
        self._spans: list[Received] = []
        self._more = threading.Condition()
        handler = type("Handler", (_Handler,), {"collector": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Collector:
        self._pool.submit(self._server.serve_forever)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._pool.shutdown()

    def receive(self, body: bytes) -> None:
        with self._more:
            self._spans += spans_of(body)
            self._more.notify_all()

    def until(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        """Return the spans once there are enough of them."""
        with self._more:
            found = self._more.wait_for(lambda: enough(self._spans), DEADLINE_S)
            assert found, sorted(span.name for span in self._spans)
            return list(self._spans)


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.collector.receive(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def spans_of(body: bytes) -> Iterator[Received]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        told = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    trace=span.trace_id,
                    id=span.span_id,
                    parent=span.parent_span_id,
                    name=span.name,
                    service=told["service.name"],
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                )


def run_client(script: str, *arguments: str) -> str:
    """Run a program of a user's, and return what it said on stderr."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


CHILDREN = {
    "submit": ("gradbox-client", None),
    "upload": ("gradbox-client", "submit"),
    "accept": ("gradbox-service", "submit"),
    "queue wait": ("gradbox-worker", "submit"),
    "turn": ("gradbox-worker", "submit"),
    "model load": ("gradbox-worker", "turn"),
    "read inputs": ("gradbox-worker", "turn"),
    "first pass": ("gradbox-worker", "turn"),
    "cotangents": ("gradbox-worker", "turn"),
    "replay": ("gradbox-worker", "turn"),
    "write result": ("gradbox-worker", "turn"),
    "download": ("gradbox-client", "submit"),
}


def test_a_job_is_one_trace_from_the_client_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models.toml"
    models.write_text(
        f'[models.m]\nbuilder = "python"\nsource = "{zoo.__file__}:affine"\n'
        "kwargs = {dropout = 0.5}\n"
    )
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with running_box(tmp_path / "data", models=models) as box:
            run_client(SUBMITS_ONE_JOB, box.url, box.token)
            spans = collector.until(lambda spans: CHILDREN.keys() <= {s.name for s in spans})
    assert len({span.trace for span in spans}) == 1
    by_name = {span.name: span for span in spans}
    assert by_name.keys() == CHILDREN.keys()
    assert len(spans) == len(CHILDREN)
    for name, (service, parent) in CHILDREN.items():
        span = by_name[name]
        assert span.service == service, name
        assert span.parent == (by_name[parent].id if parent else b""), name
        assert span.began_ns <= span.ended_ns
    phases = [by_name[name] for name, (_, parent) in CHILDREN.items() if parent == "turn"]
    assert phases == sorted(phases, key=lambda span: span.began_ns)
    turn = by_name["turn"]
    assert turn.began_ns <= phases[0].began_ns
    assert phases[-1].ended_ns <= turn.ended_ns


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(real: TestBox) -> None:
    run_client(RUNS_THE_MODEL, real.url, real.token)


def test_without_the_packages_a_job_runs_and_a_warning_says_what_to_install(
    real: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    without = "import sys\nsys.modules['opentelemetry'] = None\n" + RUNS_THE_MODEL
    said = run_client(without.partition("assert")[0], real.url, real.token)
    assert said.count("pip install 'gradbox[tracing]'") == 1


class Sends(httpx.BaseTransport):
    """Sends another header along."""

    def __init__(self, transport: httpx.BaseTransport, name: str, value: str) -> None:
        self._transport = transport
        self._header = (name, value)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers.__setitem__(*self._header)
        return self._transport.handle_request(request)


@pytest.mark.parametrize(("sent", "kept"), [(TRACEPARENT, TRACEPARENT), ("00-none", None)])
def test_the_posted_parent_is_kept_with_the_job(twin: TestBox, sent: str, kept: str | None) -> None:
    assert twin.transport is not None
    transport = Sends(twin.transport, "traceparent", sent)
    with GradClient(twin.url, twin.token, transport=transport) as client:
        job = client.submit(Forward(model="mlp", inputs=[torch.ones(2, 5).double()]))
    with twin.client() as client:
        assert client.job(job.id).view.traceparent == kept


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TRACEPARENT.upper(),
        TRACEPARENT.replace("00-", "ff-"),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        TRACEPARENT + "\n",
    ],
)
def test_what_is_no_traceparent_is_none(header: str | None) -> None:
    assert read_traceparent(header) is None


def test_no_span_is_recorded_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with Spans("test").span("work", parent=TRACEPARENT, of=1) as span:
        span.note(more=2)
        span.fail("badly")
    assert span.traceparent is None


def test_a_phase_ends_when_the_next_begins_or_an_error_leaves() -> None:
    told: list[tuple[str, float, float]] = []
    steps: list[tuple[str, int, int]] = []

    class Steps:
        def step(self, phase: str, done: int, total: int) -> None:
            steps.append((phase, done, total))

    def ended(phase: str, *, began_s: float, ended_s: float) -> None:
        told.append((phase, began_s, ended_s))

    seconds = iter(range(100))
    clock = PhaseClock(Steps(), ended, clock=lambda: float(next(seconds)))

    def run() -> None:
        with clock as phases:
            phases.enter(MODEL_LOAD)
            phases.step("forward", 0, 2)
            phases.step("forward", 2, 2)
            phases.enter(WRITE_RESULT)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run()
    assert told == [(MODEL_LOAD, 0.0, 1.0), ("first pass", 1.0, 2.0), (WRITE_RESULT, 2.0, 3.0)]
    assert steps == [("forward", 0, 2), ("forward", 2, 2)]
