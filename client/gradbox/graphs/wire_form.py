"""What a document from the wire is validated by: strict, and refused in little memory.

Pydantic makes an error of about a kilobyte for each wrong entry, so a body of a few megabytes of
wrong entries would take gigabytes to refuse. Lists and dicts stop at their first wrong entry, and
an object with more names than its form has fields is one error.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import VERSION, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Key = TypeVar("Key")
Entry = TypeVar("Entry")

# Pydantic does so with dicts from 2.14 on. The service asks for that: it reads what strangers send.
_OF_DICTS: Final = tuple(map(int, VERSION.split(".")[:2])) >= (2, 14)

Items = Annotated[list[Entry], Field(fail_fast=True)]
"""A list that is validated up to its first wrong entry."""
Entries = Annotated[dict[Key, Entry], Field(fail_fast=True if _OF_DICTS else None)]
"""A dict that is validated up to its first wrong entry."""


def _no_other_than_a_number(value: Any) -> Any:
    """Refuse what Python, or Pydantic, would read as a number: `true` is not 1, nor is "1"."""
    if isinstance(value, bool | str | bytes):
        raise PydanticCustomError("number", "a number is needed, and no boolean or string")
    return value


# Behind the type and bounds of every numeric field of a spec: before them, JSON Schema loses those.
NUMBER: Final = BeforeValidator(_no_other_than_a_number)


class WireForm(BaseModel, frozen=True):
    """Frozen, and strict about fields it does not know: a typo is an error, not a default."""

    model_config = ConfigDict(extra="forbid")

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
