"""What a handle says of its job only goes forward, whichever answer comes last."""

from __future__ import annotations

import httpx
import torch

from gradbox import Forward, JobState
from gradbox.job import Job
from tests.boxes import TestBox
from tests.client.wires import answer, client_of, job_view


def test_events_from_the_first_one_leave_a_job_that_is_over_as_it_is(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(Forward(model="mlp", inputs=[torch.ones(3, 5).double()]))
        over = job.wait()
        states = [(event.job and event.job.state, job.view.state) for event in job.events()]
    assert states[0] == (JobState.QUEUED, JobState.DONE)
    assert job.view == over


def test_an_answer_that_comes_late_takes_nothing_back() -> None:
    jobs: list[Job] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return answer(job_view(JobState.CANCELLED))
        if jobs:  # the job is cancelled while this answer, which says that it waits, is on its way
            jobs[0].cancel()
        return answer(job_view(JobState.QUEUED))

    client = client_of(handle)
    jobs.append(client.job("j1"))
    assert jobs[0].state is JobState.CANCELLED
