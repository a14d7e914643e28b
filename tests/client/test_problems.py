"""Problems of the wire as errors: which class, which category, and when the client waits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

import gradbox
from gradbox import (
    GradboxError,
    GraphRefused,
    InvalidRequest,
    JobFailed,
    JobState,
    QueueFull,
    ResultGone,
    ResultNotReady,
    ServiceUnavailable,
    StorageFull,
    TooManyRequests,
)
from gradbox.protocol import Problem, ResultView
from gradbox.protocol.problem import URN
from tests.client.wires import answer, client_of, job_view, problem


def classes() -> Iterator[type[GradboxError]]:
    for name in gradbox.__all__:
        found = getattr(gradbox, name)
        if isinstance(found, type) and issubclass(found, GradboxError):
            yield found


@pytest.mark.parametrize("kind", list(classes()), ids=lambda kind: kind.__name__)
def test_every_class_comes_back_from_its_own_problem(kind: type[GradboxError]) -> None:
    assert type(Problem.of(kind("why")).error()) is kind


def test_no_two_classes_have_one_code() -> None:
    codes = [kind.code for kind in classes()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("category", "kind"),
    [("user", InvalidRequest), ("server", GradboxError), ("transient", ServiceUnavailable)],
)
def test_a_type_that_this_version_lacks_is_of_its_category_s_class(
    category: str, kind: type[GradboxError]
) -> None:
    found = Problem.model_validate(
        {"type": f"{URN}new", "title": "t", "status": 400, "detail": "d", "category": category}
    )
    assert type(found.error()) is kind
    assert found.error().category == category
    assert isinstance(found.job_failure(), JobFailed)


def test_whatever_ends_a_job_as_failed_is_a_job_failed_of_its_own_class_too() -> None:
    failed = job_view(JobState.FAILED, error=GraphRefused("too large"))
    for _ in range(2):
        with pytest.raises(GraphRefused, match="too large") as caught:
            client_of(lambda request: answer(failed)).job("j1").result()
        assert isinstance(caught.value, JobFailed)
        assert type(caught.value).__name__ == "GraphRefused"
    assert type(Problem.of(GraphRefused("as an answer")).error()) is GraphRefused


@pytest.mark.parametrize("kind", [TooManyRequests, QueueFull, StorageFull])
def test_a_refusal_with_retry_after_is_waited_for(kind: type[ServiceUnavailable]) -> None:
    replies = [problem(kind("later"), headers={"Retry-After": "1"}), answer(job_view())]
    patient = gradbox.Retry(patience_s=5, first_pause_s=0.001)
    began = time.monotonic()
    assert client_of(lambda request: replies.pop(0), retry=patient).job("j1").id == "j1"
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize("kind", [TooManyRequests, QueueFull, StorageFull])
def test_a_refusal_beyond_patience_is_raised_as_its_class_at_once(
    kind: type[ServiceUnavailable],
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match="later"):
        client_of(lambda request: problem(kind("later"), headers={"Retry-After": "3600"})).jobs()
    assert time.monotonic() - began < 60


def test_a_full_disk_without_retry_after_is_not_asked_again() -> None:
    replies = [problem(StorageFull("full"))]
    with pytest.raises(StorageFull):
        client_of(lambda request: replies.pop(0)).jobs()


class OneResult:
    """A box with a job that is done, whose result can be deleted once."""

    def __init__(self) -> None:
        self.view = job_view(JobState.DONE, result=ResultView(size_bytes=2, sha256="0" * 64))
        self.deleted = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/j1":
            return answer(self.view)
        assert request.url.path == "/v1/jobs/j1/result"
        if self.deleted:
            return problem(ResultGone("the result was deleted"))
        if request.method == "DELETE":
            self.deleted += 1
            return httpx.Response(204)
        return httpx.Response(200, content=b"{}")


def test_a_deleted_result_is_gone() -> None:
    box = OneResult()
    job = client_of(box).job("j1")
    job.delete()
    job.delete()
    assert box.deleted == 1
    for again in (job.result, job.open):
        with pytest.raises(ResultGone, match="deleted"):
            again()


def test_a_job_that_is_done_and_has_no_result_any_more_says_so() -> None:
    job = client_of(lambda request: answer(job_view(JobState.DONE))).job("j1")
    for fetched in (job.result, job.open):
        with pytest.raises(ResultGone, match="submit the job again"):
            fetched()


def test_the_result_of_a_job_that_runs_is_not_deleted() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return problem(ResultNotReady("the job runs: cancel it first"))
        return answer(job_view(JobState.RUNNING))

    with pytest.raises(ResultNotReady, match="cancel"):
        client_of(handler).job("j1").delete()
