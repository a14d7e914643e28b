"""The counters and histograms of one service process, in a registry of its own.

A job is counted by the process whose dispatcher led when it ended, so that sums over several
processes of a box count it once; a counter begins at zero when its process starts, as Prometheus
expects.
"""

from __future__ import annotations

import logging
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from gradbox_service.jobs import JobRecord

log = logging.getLogger(__name__)

WAIT_BUCKETS_S: Final = (0.01, 0.1, 1, 10, 60, 300, 1800, 7200, 28800)
RUN_BUCKETS_S: Final = (0.01, 0.05, 0.2, 1, 5, 20, 60, 300, 1800, 7200)
REQUEST_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.05, 0.2, 1, 5, 30)


class Metrics:
    """What is counted as it happens."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.registry = registry = CollectorRegistry()
        self._jobs = Counter(
            "gradbox_jobs", "Jobs that ended", ["computation", "state"], registry=registry
        )
        self._failures = Counter(
            "gradbox_job_failures", "Jobs that failed, by reason", ["reason"], registry=registry
        )
        self._wait_s = Histogram(
            "gradbox_job_wait_seconds",
            "From a job's post to the begin of its last attempt",
            ["user"],
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self._run_s = Histogram(
            "gradbox_job_run_seconds",
            "How long the last attempt of an ended job took",
            ["computation"],
            buckets=RUN_BUCKETS_S,
            registry=registry,
        )
        self._result_bytes = Counter(
            "gradbox_job_result_bytes", "Bytes of results", ["user"], registry=registry
        )
        self._requests = Counter(
            "gradbox_http_requests", "Requests", ["method", "route", "status"], registry=registry
        )
        self._request_s = Histogram(
            "gradbox_http_request_seconds",
            "From a request's head to the end of its answer",
            ["method", "route"],
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._http_bytes = Counter(
            "gradbox_http_bytes", "Bytes of bodies", ["direction"], registry=registry
        )
        for direction in ("received", "sent"):
            self._http_bytes.labels(direction)

    def job_ended(self, record: JobRecord) -> None:
        """Count a job that ended, and log it in one line."""
        wait_s = max(0.0, (record.started_s or record.finished_s or 0.0) - record.created_s)
        run_s = None
        if record.started_s is not None and record.finished_s is not None:
            run_s = max(0.0, record.finished_s - record.started_s)
            self._run_s.labels(record.computation).observe(run_s)
        self._jobs.labels(record.computation, str(record.state)).inc()
        self._wait_s.labels(record.owner).observe(wait_s)
        self._result_bytes.labels(record.owner).inc(record.result_bytes)
        if record.error is not None:
            self._failures.labels(record.error.code).inc()
        fields = {
            "job": record.id,
            "user": record.owner,
            "computation": record.computation,
            "model": record.model,
            "state": str(record.state),
            "wait_s": round(wait_s, 3),
            "run_s": None if run_s is None else round(run_s, 3),
            "attempts": record.attempt,
            "worker": record.worker,
            "result_bytes": record.result_bytes,
            "error": None if record.error is None else record.error.code,
        }
        log.info("job ended: %s", _text(fields), extra={"fields": fields})

    def request_ended(
        self,
        *,
        method: str,
        route: str,
        status: int,
        seconds: float,
        received_bytes: int,
        sent_bytes: int,
    ) -> None:
        """Count a request that was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_s.labels(method, route).observe(seconds)
        self._http_bytes.labels("received").inc(received_bytes)
        self._http_bytes.labels("sent").inc(sent_bytes)


def _text(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
