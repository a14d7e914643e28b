"""Many jobs in one context: sent at once, gathered in order, each with its own fate."""

from __future__ import annotations

import contextlib
import threading
import time

import httpx
import pytest
import torch

from gradbox import GradboxError, Gradient, GradResult, JobCancelled, JobFailed, UntraceableLoss
from tests.boxes import TestBox
from tests.client.wires import answer, client_of, job_view

# More than comes with a job in one body.
LARGE = torch.ones(3, 50_000).double()
LARGE_ROWS = torch.ones(30_000, 5).double()
SHARD = torch.arange(15.0).reshape(3, 5).double()


def scaled(factor: float, **given: object) -> Gradient:
    fields = {"model": "mlp", "inputs": [SHARD], "loss": lambda z: factor * z.sum()}
    return Gradient(**{**fields, **given})


def test_results_come_in_the_order_of_their_jobs(box: TestBox, uploads: list[str]) -> None:
    with box.client() as client:
        with client.batch() as batch:
            for factor in range(1, 6):
                batch.submit(scaled(factor, inputs=[LARGE_ROWS]))
        results = batch.results()
        assert len(batch) == len(batch.jobs) == 5
    losses = [found.loss for found in results if isinstance(found, GradResult)]
    assert losses == pytest.approx([factor * losses[0] for factor in range(1, 6)])
    assert len(uploads) == 1


def test_a_failure_leaves_the_others_alone(twin: TestBox) -> None:
    with twin.client() as client:
        with client.batch() as batch:
            batch.submit(scaled(1))
            batch.submit(scaled(1, model="nope"))
            batch.submit(scaled(1, inputs=[torch.ones(2, 7).double()]))
            with pytest.raises(UntraceableLoss):
                batch.submit(scaled(1, loss=lambda z: z.item()))
            batch.submit(scaled(2))
        first, refused, failed, last = batch.results()
    assert isinstance(first, GradResult)
    assert isinstance(refused, GradboxError)
    assert refused.code == "unknown-model"
    assert isinstance(failed, JobFailed)
    assert isinstance(last, GradResult)
    assert last.loss == pytest.approx(2 * first.loss)


def test_one_blob_is_sent_once_however_many_threads_need_it() -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.method)
        if request.method == "HEAD":
            return httpx.Response(404)
        time.sleep(0.02)
        return answer(job_view())

    with client_of(handler) as client, client.batch() as batch:
        for index in range(8):
            batch.submit(scaled(1, inputs=[LARGE], name=f"job {index}"))
    assert seen.count("PUT") == 1
    assert seen.count("POST") == 8


def test_what_another_thread_failed_to_upload_is_tried_again() -> None:
    lock, puts = threading.Lock(), []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return httpx.Response(404)
        if request.method == "PUT":
            with lock:
                puts.append(request.url.path)
                first = len(puts) == 1
            time.sleep(0.05)
            return httpx.Response(418 if first else 201)
        return answer(job_view())

    with client_of(handler) as client:
        with client.batch() as batch:
            for _ in range(3):
                batch.submit(scaled(1, inputs=[LARGE]))
        assert len(puts) == 2
        assert len(batch.jobs) == 2


def test_an_exception_stops_what_has_not_been_sent() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert batch._stop.wait(60)
        return httpx.Response(404) if request.method == "HEAD" else answer(job_view())

    with client_of(handler) as client:
        with contextlib.suppress(ZeroDivisionError), client.batch() as batch:
            for index in range(50):
                batch.submit(scaled(index))
            raise ZeroDivisionError
        assert len(batch.jobs) < 50
        with pytest.raises(RuntimeError):
            batch.submit(scaled(1))


def test_a_batch_can_be_cancelled(twin: TestBox) -> None:
    slow = [torch.ones(2, 3) for _ in range(100)]
    with twin.client() as client:
        with client.batch() as batch:
            for seed in range(3):
                batch.submit(scaled(1, model="slow", inputs=slow, seed=seed))
        batch.cancel()
        assert all(isinstance(found, JobCancelled) for found in batch.results())
