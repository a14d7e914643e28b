"""Lists that are newest first and come in pages: what a request says of one, and the page.

A cursor names the last entry of a page by when it was created and its id, so it stays good while
entries come and go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Protocol, TypeVar

from fastapi import Query

from gradbox.errors import InvalidRequest, OwnerOnly
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import Mark

MAX_LISTED = 500
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Everybodys = Annotated[
    bool, Query(alias="all", description="Everybody's; for the box's owner alone")
]
Cursor = Annotated[str | None, Query(max_length=100, description="`next` of the page before")]


class Created(Protocol):
    """What is listed."""

    @property
    def id(self) -> str: ...
    @property
    def created_s(self) -> float: ...


Entry = TypeVar("Entry", bound=Created)


def check_may_list(caller: TokenInfo, *, everybodys: bool, what: str) -> None:
    """Raises:
    OwnerOnly: everybody's were asked for, and not by the box's owner.
    """
    if everybodys and not caller.admin:
        raise OwnerOnly(
            f"all=true lists everybody's {what}, which only the box's owner may: leave it out, or "
            f"use the token that `gradbox up` wrote"
        )


def behind(cursor: str | None) -> Mark | None:
    """Return the point in a list that a cursor names; None for the list's beginning.

    Raises:
        InvalidRequest: it names none.
    """
    if cursor is None:
        return None
    text, _, entry_id = cursor.partition("_")
    try:
        created_s = float(text)
    except ValueError:
        created_s = math.nan
    if not math.isfinite(created_s):
        raise InvalidRequest(
            f"cursor: expected what the page before gave as `next`, got {cursor!r}; leave it out "
            f"for the first page"
        )
    return Mark(created_s, entry_id)


def page_of(found: Iterable[Entry], *, limit: int) -> tuple[list[Entry], str | None]:
    """Return the first entries, and the cursor of the page behind them if there is one."""
    # One more than the page, to know whether another follows.
    entries = list(islice(found, limit + 1))
    page = entries[:limit]
    last = page[-1] if len(entries) > limit else None
    return page, None if last is None else f"{last.created_s!r}_{last.id}"
