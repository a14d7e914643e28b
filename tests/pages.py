"""The fenced blocks of README and docs/, for the tests that run them.

A block in `python` runs; one in `py` is another library's and is only parsed. A `python` block that
begins with `# NAME.py` is a file that lies beside the models file, and what `toml` blocks say of
models is that file's content.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.boxes import ROOT

DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return the page's blocks in a language, in order; `page` is a path from the root."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Return README and every page, as paths from the root."""
    found = sorted(DOCS.rglob("*.md"))
    return ["README.md", *(str(path.relative_to(ROOT)) for path in found)]


def file_name(block: str) -> str | None:
    """Return the name of the file that a Python block is, if it is one."""
    found = re.match(r"# (\w+\.py)\n", block)
    return found[1] if found else None


def program(page: str) -> str:
    """Return the page's blocks that run, one after the other as a reader would type them."""
    return "\n".join(block for block in blocks(page, "python") if file_name(block) is None)


def write_files(page: str, folder: Path) -> list[str]:
    """Write the page's files into a folder, and return its blocks of the models file."""
    for block in blocks(page, "python"):
        name = file_name(block)
        if name is not None:
            (folder / name).write_text(block)
    return [block for block in blocks(page, "toml") if block.startswith("[models.")]
