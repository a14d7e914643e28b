"""Calls that users, a worker and the cleaner make of a box, drawn at random.

Each call names jobs by the order in which they were accepted, and checks what was answered.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from gradbox.errors import ModelCallFailed
from gradbox.protocol import JobState, Problem, ProgressView, ResultView
from gradbox_service.cleaning.cleaner import Cleaner
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import Settings
from tests.service.boxes import SHARDS, blob_of, ones, spec_for
from tests.service.conftest import Box
from tests.service.test_one_trip import BOUNDARY, form

USERS = ("root", "ann", "bob:x")
BLOBS = [blob_of(SHARDS | {"0/x": number * ones(2, 2)}) for number in range(3)]
RANGES = ("bytes=0-3", "bytes=-2", "bytes=-0", "bytes=5-2", "bytes=9999-", "bytes=0-1,4-5", "x=1")
CURSORS = ("nan_a", "inf_a", "x", "0_", "1e9_a")

Call = Callable[["Asked"], Any]


@dataclass
class Asked:
    """A box that is asked, the ids of the jobs that it has accepted, and its users' tokens."""

    box: Box
    settings: Settings
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = self.box.backing.tokens
        self._tokens = {user: tokens.create(user, admin=user == "root") for user in USERS}

    def http(self, user: str, method: str, path: str, **given: Any) -> httpx.Response:
        """Ask as a user does; every refusal is a problem, and none is an error of the box."""
        headers = {"Authorization": f"Bearer {self._tokens[user]}", **given.pop("headers", {})}
        answer = self.box.client.request(method, path, headers=headers, **given)
        if answer.status_code >= 400:
            assert Problem.model_validate_json(answer.content).status == answer.status_code
            assert answer.status_code != 500, answer.text
        return answer

    def id(self, number: int) -> str:
        return self.ids[number] if number < len(self.ids) else "nobody's"


def draw(rng: random.Random, num_jobs: int) -> Call:
    """Return a call, of a box that has accepted so many jobs."""
    user, job = rng.choice(USERS), rng.randrange(num_jobs + 1)
    kinds: Mapping[str, int] = {"post": 4, "worker": 8, "list": 2, "one": 5, "clean": 1, "mode": 1}
    match rng.choices(list(kinds), list(kinds.values()))[0]:
        case "post":
            fields = {"seed": rng.randrange(2), "priority": rng.choice((0, 0, 0, 1, 99))}
            key = rng.choice((None, "a", "b"))
            return partial(post, user=user, blob=rng.randrange(3), fields=fields, key=key)
        case "worker":
            step = rng.choice(("begin", "begin", "advance", "finish", "finish", "fail", "requeue"))
            return partial(work, job=job, step=step, stale=rng.random() < 0.1)
        case "list":
            query = {"state": rng.choice((None, *JobState)), "limit": rng.choice((1, 2, 500))}
            query |= {"all": rng.choice((None, "true")), "cursor": rng.choice((None, *CURSORS))}
            return partial(listed, user=user, query={k: v for k, v in query.items() if v})
        case "one":
            method, path = rng.choice(
                [("GET", ""), ("DELETE", ""), ("DELETE", "/result"), *[("GET", "/result")] * 2]
            )
            headers = {"Range": rng.choice(RANGES)} if rng.random() < 0.5 else {}
            return partial(one, user=user, job=job, method=method, path=path, headers=headers)
        case "clean":
            return partial(
                clean, expired=rng.choice(("result_age_s", "blob_age_s", "record_age_s"))
            )
    order = {"mode": rng.choice(("running", "running", "paused", "draining")), "reason": "why"}
    return lambda asked: asked.http(user, "PUT", "/v1/operation", json=order)


def post(asked: Asked, *, user: str, blob: int, fields: Mapping[str, Any], key: str | None) -> None:
    digest, data = BLOBS[blob]
    body = form([("job", json.dumps(spec_for(digest, **fields)).encode()), (digest, data)])
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    headers |= {"Idempotency-Key": key} if key else {}
    answer = asked.http(user, "POST", "/v1/jobs", content=body, headers=headers)
    if answer.status_code == 202 and answer.json()["id"] not in asked.ids:
        asked.ids.append(answer.json()["id"])


def one(asked: Asked, *, user: str, job: int, method: str, path: str, headers: Any) -> None:
    url = f"/v1/jobs/{asked.id(job)}{path}"
    if "Range" in headers and path == "/result":
        etag = asked.http(user, "GET", url).headers.get("etag")
        headers = headers | ({"If-Range": etag} if etag else {})
    answer = asked.http(user, method, url, headers=headers)
    record = asked.box.backing.records.get(asked.id(job))
    if record is None or user not in ("root", record.owner):
        assert answer.status_code == 404


def listed(asked: Asked, *, user: str, query: dict[str, Any]) -> None:
    """Go through all pages: each job that there is comes once, the newest first."""
    answer = asked.http(user, "GET", "/v1/jobs", params=query)
    if answer.status_code != 200:
        return
    found, page = list(answer.json()["jobs"]), answer.json()
    while page["next"]:
        page = asked.http(user, "GET", "/v1/jobs", params=query | {"cursor": page["next"]}).json()
        found += page["jobs"]
    ids = [view["id"] for view in found]
    if "cursor" not in query:
        stored = asked.box.backing.records.many(asked.ids[::-1])
        mine = [r for r in stored if "all" in query or r.owner == user]
        assert ids == [r.id for r in mine if query.get("state") in (None, r.state)]


def work(asked: Asked, *, job: int, step: str, stale: bool) -> None:
    """Do what the worker that holds the job does, or one that was thought dead."""
    backing, job_id, now_s = asked.box.backing, asked.id(job), time.time()
    record = backing.records.get(job_id)
    attempt = (record.attempt if record else 0) - stale
    data = f"{job} {attempt}".encode() * 9
    result = ResultView(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    if step == "finish" and record and record.held_by(attempt):
        path = backing.results.path(job_id, attempt=attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    progress = ProgressView(phase="forward", done=1, total=2)
    error = Problem.of(ModelCallFailed("no"))
    steps: dict[str, Callable[[JobRecord], JobRecord | None]] = {
        "begin": partial(JobRecord.begin, worker="worker-1", now_s=now_s),
        "advance": partial(JobRecord.advance, attempt=attempt, progress=progress),
        "finish": partial(JobRecord.finish, attempt=attempt, result=result, now_s=now_s),
        "fail": partial(JobRecord.fail, attempt=attempt, error=error, now_s=now_s),
        "requeue": partial(JobRecord.requeue, attempt=attempt, reason="it died", now_s=now_s),
    }
    backing.records.update(job_id, steps[step], lease_s=600.0 if step == "begin" else None)


def clean(asked: Asked, *, expired: str) -> None:
    """Remove everything of one kind that no job needs, as if it had expired."""
    backing, settings = asked.box.backing, asked.settings.model_copy(update={expired: 1e-9})
    time.sleep(0.002)  # a file's time has its own grain
    Cleaner(settings, backing).clean()
