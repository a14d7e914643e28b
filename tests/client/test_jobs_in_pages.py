"""`client.jobs()` goes through all jobs, page by page."""

from __future__ import annotations

import httpx

from gradbox.box_client import PAGE
from tests.client.test_problems import client_of

JOB = {"state": "done", "computation": "gradient", "model": "m", "owner": "ann", "created_s": 1.0}


def page(request: httpx.Request, asked: list[dict[str, str]], num_jobs: int) -> httpx.Response:
    """Answer as a box of so many jobs whose pages have two."""
    query = dict(request.url.params)
    asked.append(query)
    start = int(query.get("cursor", 0))
    end = min(num_jobs, start + min(2, int(query.get("limit", 2))))
    jobs = [JOB | {"id": f"job{number}"} for number in range(start, end)]
    return httpx.Response(200, json={"jobs": jobs, "next": str(end) if end < num_jobs else None})


def test_all_jobs_come_in_order_and_only_as_many_pages_as_are_read() -> None:
    asked: list[dict[str, str]] = []
    client = client_of(lambda request: page(request, asked, 5))
    jobs = client.jobs(state="done")
    assert asked == [{"state": "done"}]
    assert next(jobs).id == "job0"
    assert len(asked) == 1
    assert [job.id for job in jobs] == ["job1", "job2", "job3", "job4"]
    assert [query.get("cursor") for query in asked] == [None, "2", "4"]


def test_a_limit_counts_over_pages() -> None:
    asked: list[dict[str, str]] = []
    client = client_of(lambda request: page(request, asked, 5))
    assert [job.id for job in client.jobs(limit=3)] == ["job0", "job1", "job2"]
    assert [query["limit"] for query in asked] == ["3", "1"]
    assert len(list(client.jobs(limit=PAGE + 1))) == 5
