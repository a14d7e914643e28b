"""Errors on the wire: RFC 9457 problem details with a stable type and a category."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from gradbox.errors import (
    Category,
    GradboxError,
    InvalidRequest,
    JobFailed,
    ServiceUnavailable,
)

URN = "urn:gradbox:problem:"

# What a problem is whose type this version does not know: its category says what helps.
BY_CATEGORY: dict[Category, type[GradboxError]] = {
    "user": InvalidRequest,
    "server": GradboxError,
    "transient": ServiceUnavailable,
}


class Problem(BaseModel):
    """One problem+json document.

    `detail` is a sentence for a person: what was expected, what was found, what to do. `request_id`
    finds the request in the service's log.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    title: str
    status: int
    detail: str
    category: Category
    request_id: str | None = None

    @classmethod
    def of(cls, error: GradboxError, **extra: Any) -> Problem:
        """Describe an error of ours."""
        kind = type(error)
        return cls(
            type=URN + kind.code,
            title=kind.title,
            status=kind.status,
            detail=str(error),
            category=error.category,
            **extra,
        )

    @property
    def code(self) -> str:
        return self.type.removeprefix(URN)

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"

    def error(self) -> GradboxError:
        """Return the error to raise where a request was answered with this problem.

        It is of the class that the type names, and of its category's where this version has none.
        """
        return _raised(self, error_class(self.code) or BY_CATEGORY[self.category])

    def job_failure(self) -> GradboxError:
        """Return the error to raise for a job that ended with this problem, always a JobFailed."""
        return _raised(self, failure_class(self.code))


def error_class(code: str) -> type[GradboxError] | None:
    """Return the class whose problems carry `code`; None for one that this version lacks."""
    return _by_code().get(code)


@cache
def failure_class(code: str) -> type[GradboxError]:
    """Return what a job raises that failed with this code: the code's class and a JobFailed."""
    kind = error_class(code) or JobFailed
    if issubclass(kind, JobFailed):
        return kind
    text = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, JobFailed), text)


def _by_code() -> dict[str, type[GradboxError]]:
    found: dict[str, type[GradboxError]] = {}
    pending: list[type[GradboxError]] = [GradboxError]
    while pending:
        cls = pending.pop()
        if "code" in vars(cls):  # those that `failure_class` made have none of their own
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


def _raised(problem: Problem, kind: type[GradboxError]) -> GradboxError:
    error = kind(problem.detail)
    # Which blobs are missing, where a run is: the fields that the class has beside its message.
    more = problem.model_extra or {}
    vars(error).update({name: more[name] for name in more.keys() & vars(error).keys()})
    error.category = problem.category
    return error
