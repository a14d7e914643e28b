"""Shares: what one user may take before the others feel it."""

from __future__ import annotations

import time

import torch

from proofs.attacks.attack import attack
from proofs.attacks.target import Target, own_box


@attack(
    "share: above everybody",
    tries="a job with priority 10, by a user who does not own the box",
    must="403 or 422: priorities above 0 are the owner's",
)
def _priority(target: Target) -> None:
    assert target.post(target.eve, priority=10).status_code in (403, 422)
    assert target.post(target.eve, priority=-3).status_code == 202


@attack(
    "share: for ever",
    tries="a job with a time limit of 25 hours, and of thirty years",
    must="422 that names the longest one",
)
def _timeout(target: Target) -> None:
    for seconds in (1e9, 25 * 3600.0):
        answer = target.post(target.eve, timeout_s=seconds)
        assert answer.status_code == 422, answer.status_code
        assert "timeout_s" in answer.json()["detail"]


@attack(
    "share: the whole queue",
    tries="30 waiting jobs where a user may have 10",
    must="429 with Retry-After from the eleventh on; others may still post",
    slow=True,
)
def _queue(target: Target) -> None:
    with own_box(models=["slow"], environment={"GRADBOX_MAX_QUEUED_JOBS": "10"}) as own:
        blob = own.upload(own.eve, {f"{shard}/0": torch.ones(1, 3) for shard in range(40)})
        shards = [{"blob": blob, "prefix": f"{shard}/"} for shard in range(40)]
        answers = [own.post(own.eve, model="slow", inputs=[{"shards": shards}]) for _ in range(30)]
        assert [answer.status_code for answer in answers[:10]] == [202] * 10
        assert answers[-1].status_code == 429, answers[-1].status_code
        assert int(answers[-1].headers["retry-after"]) > 0
        assert own.post(own.ann, model="slow").status_code == 202


@attack(
    "share: every request",
    tries="300 requests at once where a token may send 10 a second",
    must="429 with Retry-After for most of them; another token is answered",
    slow=True,
)
def _rate(target: Target) -> None:
    with own_box(environment={"GRADBOX_REQUESTS_PER_S": "10"}) as own:
        begin = time.monotonic()
        answers = [own.eve.get("/v1/jobs?limit=1") for _ in range(300)]
        allowed = sum(answer.status_code == 200 for answer in answers)
        refused = [answer for answer in answers if answer.status_code == 429]
        # Some may come at once; what is left is the rate.
        assert allowed <= 60 + 10 * (time.monotonic() - begin), f"{allowed} of 300 were answered"
        assert int(refused[0].headers["retry-after"]) >= 0
        assert own.ann.get("/v1/jobs?limit=1").status_code == 200
