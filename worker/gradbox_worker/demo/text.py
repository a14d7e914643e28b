"""Real text that every Python carries: its own documentation strings, as (query, passage) pairs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

_MODULES = (
    "abc argparse array ast asyncio.tasks base64 bisect bz2 calendar cmath codecs collections "
    "concurrent.futures configparser contextlib copy csv datetime decimal difflib dis "
    "email.message enum fractions functools gettext glob gzip hashlib heapq hmac html "
    "http.client http.cookies imaplib inspect io ipaddress itertools json keyword linecache "
    "locale logging lzma mailbox math mimetypes multiprocessing.pool numbers operator os "
    "os.path pathlib platform plistlib pprint queue random re sched secrets selectors shelve "
    "shlex shutil signal smtplib socket sqlite3 ssl statistics string struct subprocess sys "
    "tarfile tempfile textwrap threading time timeit token tokenize traceback types unicodedata "
    "unittest.case urllib.parse urllib.request uuid warnings weakref xml.dom.minidom "
    "xml.etree.ElementTree zipfile zlib"
).split()
_MIN_PASSAGE_CHARS = 60


def documentation_pairs(num_pairs: int) -> list[tuple[str, str]]:
    """Return pairs of a documentation string's first sentence and its remainder.

    The same interpreter gives the same pairs in the same order; no query or passage comes twice.

    Raises:
        ValueError: the interpreter documents fewer functions than that.
    """
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    for query, passage in _documented():
        if query in seen or passage in seen:
            continue
        seen.update((query, passage))
        pairs.append((query, passage))
        if len(pairs) == num_pairs:
            return pairs
    raise ValueError(
        f"expected at most {len(pairs)} pairs, which is what this Python documents, got {num_pairs}"
    )


def _documented() -> Iterator[tuple[str, str]]:
    for module_name in _MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # optional parts of the standard library
            continue
        yield from _of_namespace(module_name, module)


def _of_namespace(path: str, namespace: ModuleType | type) -> Iterator[tuple[str, str]]:
    for name, member in sorted(vars(namespace).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if not callable(member):
            continue
        pair = _split(f"{path}.{name}", inspect.getdoc(member) or "")
        if pair is not None:
            yield pair
        if isinstance(member, type) and isinstance(namespace, ModuleType):
            yield from _of_namespace(f"{path}.{name}", member)


def _split(path: str, documentation: str) -> tuple[str, str] | None:
    text = re.sub(r"\s+", " ", documentation).strip()
    first, _, rest = text.partition(". ")
    if len(rest) < _MIN_PASSAGE_CHARS or not first:
        return None
    return f"{path}: {first}.", rest
