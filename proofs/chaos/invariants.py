"""What must hold when the faults are over: nothing lost, wrong, doubled, stuck or orphaned."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis

from proofs.chaos.box import Box
from proofs.chaos.ledger import Accepted, Ledger

FINAL = ("done", "failed", "cancelled")
STATES = ("queued", "running", *FINAL)
MAX_LISTED = 500
SETTLED_WITHIN_S = 150.0
CLEARED_WITHIN_S = 90.0  # RQ takes a turn back that lay a minute between dequeuing and begin
# Jobs and blobs are known by these wherever their names appear, in files as in keys.
JOB_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass
class Findings:
    """Sentences by invariant; none means that it holds."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)
    server_errors: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    never_recovered: list[str] = field(default_factory=list)


def states_when_settled(box: Box, findings: Findings) -> dict[str, dict[str, Any]]:
    """Wait until every job of every owner has ended; return the jobs by id."""
    give_up = time.monotonic() + SETTLED_WITHIN_S
    while True:
        jobs = {job["id"]: job for owner in box.tokens for job in _listed(box, owner)}
        open_jobs = [job for job in jobs.values() if job["state"] not in FINAL]
        if not open_jobs or time.monotonic() > give_up:
            break
        time.sleep(0.5)
    for job in open_jobs:
        findings.stuck.append(
            f"job {job['id']} ({job['name']}) is {job['state']} in attempt {job['attempts']}"
        )
    return jobs


def judge_jobs(
    box: Box, ledger: Ledger, jobs: Mapping[str, Mapping[str, Any]], findings: Findings
) -> None:
    """Compare what the box has with what users were told."""
    findings.wrong += ledger.wrong
    findings.doubled += ledger.doubled
    findings.stuck += ledger.stuck
    findings.unexpected += ledger.unexpected
    findings.server_errors += ledger.server_errors
    for promised in ledger.accepted:
        if promised.id not in jobs and not _known(box, promised):
            findings.lost.append(f"job {promised.id} ({promised.name}) was accepted and is gone")
    for name, count in Counter(job["name"] for job in jobs.values()).items():
        if count > 1:
            findings.doubled.append(f"{name} was submitted once and is {count} jobs")
        if name not in ledger.submitted:
            findings.doubled.append(f"{name!r} was submitted by nobody")
    findings.unexpected += [said for job in jobs.values() if (said := _odd_end(job, ledger))]
    for owner in box.tokens:
        with box.http(owner) as http:
            for job in jobs.values():
                if job["owner"] == owner and job["state"] == "done":
                    answer = http.head(f"/v1/jobs/{job['id']}/result")
                    # Every user fetches what ends; one that finds it gone has said so by now.
                    freed = answer.status_code == 410 and job["finished_s"] < ledger.filled_s
                    if answer.status_code != 200 and not freed:
                        said = f"job {job['id']} is done, its result answers {answer.status_code}"
                        findings.lost.append(said)


def _odd_end(job: Mapping[str, Any], ledger: Ledger) -> str | None:
    """Say what is odd about how a job ended: cancelled by nobody, or failed without a cause."""
    where = f"job {job['id']} ({job['name']})"
    if job["state"] == "cancelled" and job["name"] not in ledger.cancelled:
        return f"{where} is cancelled, and nobody asked for that"
    if job["state"] != "failed":
        return None
    code = job["error"]["type"].rpartition(":")[2]
    # The same fault twice at the same shard may end a job as three lost attempts do.
    if code == "storage-full" or (code == "worker-lost" and job["attempts"] >= 2):
        return None
    return f"{where} failed in attempt {job['attempts']}: {job['error']['detail'][:300]}"


def _known(box: Box, promised: Accepted) -> bool:
    """Tell whether the box knows a job that a listing was too short for."""
    with box.http(promised.owner) as http:
        return http.get(f"/v1/jobs/{promised.id}").is_success


def judge_processes(box: Box, findings: Findings) -> None:
    """Look for processes beyond one service, one Redis, and those of each worker."""
    expected = {"up": 1, "valkey": 1, "service": 1}
    expected |= {"worker": box.num_workers, "device": box.num_workers}
    give_up = time.monotonic() + 30.0
    while True:
        # What a worker keeps beside its device is started again as it is needed.
        found = [p for p in box.processes() if p.role != "beside"]
        if Counter(p.role for p in found) == expected or time.monotonic() > give_up:
            break
        time.sleep(0.2)
    counts = Counter(process.role for process in found)
    for role in sorted(counts.keys() | expected.keys()):
        if counts[role] != expected.get(role, 0):
            commands = [p.command[:100] for p in found if p.role == role]
            findings.orphaned.append(
                f"{counts[role]} processes of the kind {role!r} at rest, "
                f"expected {expected.get(role, 0)}: {commands}"
            )


def judge_files(box: Box, jobs: Mapping[str, Mapping[str, Any]], findings: Findings) -> None:
    """Look for files that belong to no job that is done, and for more than one of a job."""
    of_jobs: Counter[str] = Counter()
    for path in sorted(box.data.rglob("*")):
        inside = path.relative_to(box.data)
        if not path.is_file() or inside.parts[0] in ("redis", "logs"):
            continue
        job_id = JOB_ID.search(path.name)
        if job_id:
            state = jobs[job_id[0]]["state"] if job_id[0] in jobs else "unknown"
            of_jobs[job_id[0]] += 1
            if state != "done":
                findings.orphaned.append(f"the file {inside} of a job that is {state}")
        elif "incoming" in inside.parts or path.suffix in (".partial", ".tmp"):
            findings.orphaned.append(f"the file {inside}, half written")
        elif len(inside.parts) > 1 and "blobs" in inside.parts and not DIGEST.search(path.name):
            findings.orphaned.append(f"the file {inside}, which is no blob")
    for job_id_, count in of_jobs.items():
        if count > 1:
            findings.orphaned.append(f"{count} files of job {job_id_}")


def judge_keys(box: Box, jobs: Mapping[str, Mapping[str, Any]], findings: Findings) -> None:
    """Look for keys in Redis that nothing needs, once the box has had time to clear them away."""
    give_up = time.monotonic() + CLEARED_WITHIN_S
    with redis.Redis(unix_socket_path=str(box.data / "redis" / "redis.sock")) as connection:
        while True:
            found = _idle_keys(connection, jobs)
            if not found or time.monotonic() > give_up:
                break
            time.sleep(1.0)
    findings.orphaned += found


def _idle_keys(connection: redis.Redis, jobs: Mapping[str, Any]) -> list[str]:
    """Return what Redis holds of jobs that nobody has, and what only open jobs need."""
    found = []
    for key in sorted(name.decode() for name in connection.scan_iter(count=1000)):
        job_id = JOB_ID.search(key)
        forever = connection.ttl(key) == -1
        if job_id and job_id[0] not in jobs:
            found.append(f"the key {key} of a job that nobody has")
        elif key.startswith(("gradbox:lease:", "rq:job:", "rq:execution")) and forever:
            found.append(f"the key {key}, which no running job needs")
        elif key.startswith("gradbox:active:") and connection.zcard(key):
            found.append(f"{connection.zcard(key)} jobs in {key}")
        elif connection.type(key) == b"list" and connection.llen(key):
            found.append(f"{connection.llen(key)} turns in {key}")
    return found


def left_running(box: Box, findings: Findings) -> None:
    """Stop the box, and look for what it left."""
    for process in box.stop():
        findings.orphaned.append(
            f"the process {process.pid} after the end: {process.command[:120]}"
        )


def _listed(box: Box, owner: str) -> Sequence[dict[str, Any]]:
    """Return an owner's jobs in every state; the listing of one state is long enough for a run."""
    found: list[dict[str, Any]] = []
    with box.http(owner) as http:
        for state in STATES:
            answer = _insist(http, {"state": state, "limit": MAX_LISTED})
            found += answer.json()["jobs"]
    return found


def _insist(http: httpx.Client, parameters: Mapping[str, Any]) -> httpx.Response:
    give_up = time.monotonic() + SETTLED_WITHIN_S
    while True:
        try:
            answer = http.get("/v1/jobs", params=parameters)
            answer.raise_for_status()
        except httpx.HTTPError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.5)
        else:
            return answer
