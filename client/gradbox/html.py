"""What notebooks show: small tables that inherit the page's colours, dark or light.

Text in them may come from the other side of the wire, so all of it is escaped.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from gradbox.printable import printable

Item = TypeVar("Item")

# The entries of a long list that are shown; a line says how many more there are.
SHOWN_ROWS: Final = 12
MOST_COLUMNS: Final = 8
# In seconds since 1970; a smaller number of seconds is a duration.
A_TIME_S: Final = 1e9
_LONGEST_TEXT: Final = 500

_CELL: Final = "text-align:left;padding:1px 12px 1px 0;vertical-align:top"
_BLOCK: Final = "margin:4px 0;font-size:13px;line-height:1.4"


def escaped(text: object) -> str:
    """Return text as HTML shows it, without markup and without what does not print."""
    plain = printable(text)
    if len(plain) > _LONGEST_TEXT:
        plain = plain[:_LONGEST_TEXT] + "…"
    return html.escape(plain)


def card(title: str, facts: Iterable[tuple[str, object]], *blocks: str) -> str:
    """Return a block with a title, a table of facts and further blocks of HTML.

    Args:
        facts: names and values; those that are None or empty are left out.
    """
    rows = [(name, value) for name, value in facts if value not in (None, "", [], {})]
    shown = "".join(
        f'<tr><th scope="row" style="{_CELL};font-weight:normal;opacity:0.75">{escaped(name)}</th>'
        f'<td style="{_CELL}">{escaped(value)}</td></tr>'
        for name, value in rows
    )
    table = f'<table style="border:none;background:none">{shown}</table>' if rows else ""
    return f'<div style="{_BLOCK}"><strong>{escaped(title)}</strong>{table}{"".join(blocks)}</div>'


def listing(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    what: str,
) -> str:
    """Return a table of the first rows, and how many more there are.

    Args:
        what: what a row is, in the plural.
    """
    if not rows:
        return ""
    head = "".join(
        f'<th scope="col" style="{_CELL};opacity:0.75;font-weight:normal">{escaped(heading)}</th>'
        for heading in headings
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escaped(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:SHOWN_ROWS]
    )
    left = len(rows) - SHOWN_ROWS
    more = f'<div style="opacity:0.75">and {left:,} more {escaped(what)}</div>' if left > 0 else ""
    return f'<table style="border:none;background:none"><tr>{head}</tr>{body}</table>{more}'


def described(view: BaseModel, *, title: str) -> str:
    """Return a block of what a view says."""
    facts, tables = fields_of_view(view, most=MOST_COLUMNS)
    blocks = [listing(titles, rows, what=name) for name, (titles, *rows) in tables.items()]
    return card(title, facts.items(), *blocks)


def fields_of_view(
    view: BaseModel, *, most: int
) -> tuple[dict[str, str], dict[str, list[list[str]]]]:
    """Return what a view says, field by field: texts, and tables whose first rows are titles.

    Args:
        most: how many entries of a list to write down; a longer one is its length.
    """
    facts, tables = {}, {}
    for name, field in type(view).model_fields.items():
        value = getattr(view, name)
        if value == field.default:
            continue
        if isinstance(value, list) and value and isinstance(value[0], BaseModel):
            columns = _columns(value)
            rows = [[_written(column, getattr(row, column)) for column in columns] for row in value]
            tables[_words(name)] = [[*map(_words, columns)], *rows]
        else:
            facts[_words(name)] = _written(name, value, most=most)
    return facts, tables


def _columns(rows: Sequence[BaseModel]) -> list[str]:
    """Return the fields in which one of the rows says something."""
    fields = type(rows[0]).model_fields
    given = (n for n in fields if any(getattr(row, n) != fields[n].default for row in rows))
    return list(given)[:MOST_COLUMNS]


def _words(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _written(name: str, value: Any, *, most: int = MOST_COLUMNS) -> str:
    """Write a field's value down: times and sizes for people, what is long by its length."""
    match value:
        case None:
            return ""
        case int() if name.endswith("_bytes"):
            return size(value)
        case float() if name.endswith("_s") and value > A_TIME_S:
            return local(value)
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
        case BaseModel() if type(value).__str__ is not BaseModel.__str__:
            return str(value)
        case BaseModel():
            given = ((n, v) for n, v in value if v != type(value).model_fields[n].default)
            return ", ".join(f"{_words(n)} {_written(n, v)}" for n, v in given)
        case dict() if len(value) <= SHOWN_ROWS:
            return ", ".join(f"{key} {_written(str(key), entry)}" for key, entry in value.items())
        case list() | tuple() if name == "shape":
            return shape(value)
        case list() | tuple() if len(value) <= most:
            return ", ".join(_written("", entry) for entry in value)
    return f"{len(value):,}"


def local(time_s: float) -> str:
    """Return a time, given in seconds since 1970, by the clock of this place."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def meter(done: int, total: int, *, label: str) -> str:
    """Return a bar that is full when `done` is `total`."""
    return (
        f'<progress value="{int(done)}" max="{max(int(total), 1)}" aria-label="{escaped(label)}" '
        f'style="width:240px;vertical-align:middle"></progress> {escaped(label)}'
    )


def shape(sizes: Iterable[int]) -> str:
    """Write a tensor's shape down."""
    return " × ".join(map(str, sizes)) or "scalar"


def size(num_bytes: int) -> str:
    """Write a number of bytes down, in the largest unit of which there is one."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.3g} {unit}"
    return f"{num_bytes} bytes"


class Html(str):
    """A whole page, to be written to a file, which a notebook shows in place."""

    def __new__(cls, block: str, *, title: str) -> Html:
        """Make a page of a block of HTML."""
        head = f'<meta charset="utf-8"><title>{escaped(title)}</title>'
        scheme = "<style>:root{color-scheme:light dark}</style>"
        block = f'<div style="{_BLOCK};font-family:system-ui,sans-serif">{block}</div>'
        page = super().__new__(cls, f'<!doctype html><html lang="en">{head}{scheme}{block}</html>')
        page._block = block
        return page

    _block: str

    def _repr_html_(self) -> str:
        return self._block


class Listed(list[Item]):
    """A list that a notebook shows as the table that `html` makes."""

    def __init__(self, items: Iterable[Item], *, html: Callable[[], str]) -> None:
        super().__init__(items)
        self._repr_html_ = html


class Iterated(Iterator[Item]):
    """An iterator that a notebook shows as the table that `html` makes."""

    def __init__(self, items: Iterator[Item], *, html: Callable[[], str]) -> None:
        self._items = items
        self._repr_html_ = html

    def __next__(self) -> Item:
        return next(self._items)
