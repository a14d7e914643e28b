"""What a document from the wire is validated by: strict, and refused in little memory.

Pydantic makes an error of about a kilobyte for each wrong entry, so a body of a few megabytes of
wrong entries would take gigabytes to refuse. Lists and dicts stop at their first wrong entry, and
an object with more names than its form has fields is one error.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Key = TypeVar("Key")
Entry = TypeVar("Entry")

Items = Annotated[list[Entry], Field(fail_fast=True)]
"""A list that is validated up to its first wrong entry."""
Entries = Annotated[dict[Key, Entry], Field(fail_fast=True)]
"""A dict that is validated up to its first wrong entry."""


class WireForm(BaseModel):
    """Frozen, and strict about fields it does not know: a typo is an error, not a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_more_names_than_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            unknown = next(name for name in given if name not in cls.model_fields)
            raise PydanticCustomError(
                "too_many_names",
                "Expected no other fields than {fields}, got {count} names, {unknown} for one",
                {
                    "fields": ", ".join(cls.model_fields),
                    "count": len(given),
                    "unknown": repr(unknown)[:80],
                },
            )
        return given
