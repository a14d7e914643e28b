"""Errors on the wire: RFC 9457 problem details with a stable type and a category."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from gradbox.errors import Category, GradboxError, error_class

URN = "urn:gradbox:problem:"


class Problem(BaseModel):
    """One problem+json document.

    `detail` is a sentence for a person: what was expected, what came, what to do. `request_id`
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

    def error(self) -> GradboxError:
        """Return the error to raise for this problem, of the class that its type names.

        Types without a class, such as `invalid-request`, still have their category.
        """
        error = error_class(self.code)(self.detail)
        error.category = self.category
        return error
