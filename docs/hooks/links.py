"""Links of the pages that leave docs/, and what a built page may load.

The pages are read on the code host, too, where `../examples/x.py` leads to a file of the
repository. On the site there is no such file: the link becomes the file's path as code, once the
file is known to exist. With `repo_url` in mkdocs.yml it leads there instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<up>(?:\.\./)+)(?P<path>[^)#]+)(?:#[^)]*)?\)")
LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//", re.IGNORECASE
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files of the repository outside docs/."""
    depth = page.file.src_uri.count("/") + 1

    def replaced(link: re.Match[str]) -> str:
        if link["up"].count("../") != depth:
            return link[0]
        if not (ROOT / link["path"]).exists():
            raise PluginError(f"{page.file.src_uri}: {link[0]} names no file of the repository")
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{link['path']})"
        text = link["text"].strip("`")
        shown = f"`{link['path']}`"
        named = link["path"].endswith(text)
        return shown if named else f"{link['text']} ({shown})"

    return OUTSIDE.sub(replaced, markdown)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Refuse a page that would load something from another host."""
    canonical = re.sub(r'<link rel="?canonical"?[^>]*>', "", output)
    found = LOADED.search(canonical)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output
