"""Small jobs in one request: what is sent and verified, and what becomes of a trip that breaks."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from gradbox import GradClient, Gradient, GradResult, ProtocolError, Retry
from gradbox.protocol import JOB_AND_RESULT, JobState, ResultView, joined_with_result
from proofs.chaos.processes import processes_of
from tests.boxes import TestBox
from tests.client.wires import client_of, job_view

PATIENT = Retry(patience_s=120.0)
WITHIN_S = 120.0
SHARD = torch.arange(15.0).reshape(3, 5).double()


def sum_of_squares(z: Tensor) -> Tensor:
    return (z * z).sum()


def small(**given: object) -> Gradient:
    return Gradient(**{"model": "mlp", "inputs": [SHARD], "loss": sum_of_squares, **given})


class Seen(httpx.BaseTransport):
    """Passes requests on, and notes them; the answers to the first POSTs may be lost."""

    def __init__(self, box: TestBox, *, lost: int = 0) -> None:
        self._inner = box.transport or httpx.HTTPTransport()
        self._lost = lost
        self.requests: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        answer = self._inner.handle_request(request)
        if request.method == "POST" and self._lost:
            self._lost -= 1
            answer.read()
            raise httpx.ReadError("the connection broke before the answer came")
        return answer


def through(box: TestBox, transport: Seen) -> GradClient:
    return GradClient(box.url, box.token, transport=transport, retry=PATIENT)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an answer wait for as long as a busy machine may take."""
    monkeypatch.setattr("gradbox.client.QUICK_S", 30)
    monkeypatch.setattr("gradbox.job.QUICK_S", 30)


@pytest.mark.usefixtures("patient")
def test_run_is_one_request(twin: TestBox) -> None:
    transport = Seen(twin)
    client = through(twin, transport)
    found = client.run(small())
    assert transport.requests == ["POST /v1/jobs"]
    assert found.loss == client.submit(small()).result().loss


@pytest.mark.usefixtures("patient")
def test_submit_and_result_are_two_requests(twin: TestBox) -> None:
    transport = Seen(twin)
    job = through(twin, transport).submit(small(seed=1))
    job.result()
    assert transport.requests == ["POST /v1/jobs", f"GET /v1/jobs/{job.id}"]


def test_a_result_that_came_along_can_be_fetched_again(twin: TestBox) -> None:
    with twin.client() as client:
        job = client.submit(small(seed=2))
        assert job.result().loss == job.result().loss


@pytest.mark.usefixtures("patient")
def test_a_result_that_came_along_is_no_file_until_it_is_saved(
    twin: TestBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder(**_: object) -> str:
        raise AssertionError("expected no folder for a small result")

    monkeypatch.setattr("gradbox.job.tempfile.mkdtemp", no_folder)
    with twin.client() as client:
        found = client.run(small(seed=3))
    found.save(tmp_path / "saved.safetensors")
    saved = GradResult.load(tmp_path / "saved.safetensors")
    assert saved.manifest == found.manifest
    assert list(saved.grads) == list(found.grads)
    assert all(torch.equal(saved.grads[name], found.grads[name]) for name in found.grads)


@pytest.mark.usefixtures("patient")
def test_an_answer_that_is_lost_makes_no_second_job(box: TestBox) -> None:
    transport = Seen(box, lost=2)
    name = f"lost-{time.time()}"
    client = through(box, transport)
    found = client.run(small(name=name))
    assert transport.requests == ["POST /v1/jobs"] * 3
    (job,) = [job for job in client.jobs(limit=20) if job.view.name == name]
    assert job.result().loss == found.loss


def test_a_small_result_with_another_digest_is_no_result() -> None:
    content = b"what was sent"
    told = ResultView(size_bytes=len(content), sha256=hashlib.sha256(b"another").hexdigest())
    body = joined_with_result(job_view(JobState.DONE, result=told), content)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body, headers={"Content-Type": JOB_AND_RESULT})

    with pytest.raises(ProtocolError, match="SHA-256"):
        client_of(answer).run(small())


@pytest.mark.parametrize("cut", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"[1,2]"])
def test_an_answer_of_another_form_is_said(cut: bytes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=cut, headers={"Content-Type": JOB_AND_RESULT})

    with pytest.raises(ProtocolError, match="older or newer"):
        client_of(answer).run(small())


@pytest.mark.parametrize(
    "part",
    [  # tests/worker kills workers and devices
        "service",
        pytest.param("worker", marks=pytest.mark.slow),
        pytest.param("device", marks=pytest.mark.slow),
        "valkey",
    ],
)
def test_a_part_killed_in_the_middle_of_the_trip_costs_no_job(real: TestBox, part: str) -> None:
    name = f"{part}-{time.time()}"
    shards = [torch.randn(2, 3) for _ in range(10)]  # a second
    slow = Gradient(model="slow", inputs=shards, loss=sum_of_squares, name=name)
    with real.client(retry=PATIENT) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.run, slow)
        with real.client(retry=PATIENT) as other:

            def states() -> list[JobState]:
                jobs = other.jobs(limit=5)
                return [job.view.state for job in jobs if job.view.name == name]

            until(lambda: JobState.RUNNING in states())
            assert real.data is not None
            victims = [p for p in processes_of("no mark", real.data) if p.role == part]
            assert victims
            for process in victims:
                process.signal(signal.SIGKILL)
            found = running.result(WITHIN_S)
            assert states() == [JobState.DONE]
        assert found.loss == pytest.approx(client.run(slow).loss)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)
