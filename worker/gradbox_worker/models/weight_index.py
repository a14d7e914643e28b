"""Index files of sharded weights: they may name safetensors files beside them and nothing else.

transformers reads the files that an index names by their endings, one that does not end in
.safetensors by torch's own unpickler, and joins a path to the folder as it is. So a folder of
somebody else's could have any file of the machine read, or unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

INDEX_FILES: Final = "*.safetensors.index*.json"
ENDING: Final = ".safetensors"


def wrong_indices(folder: Path) -> list[str]:
    """Return what is wrong with each index file in a folder and below it, as sentences."""
    return [
        f"{path.relative_to(folder)}: {why}"
        for path in sorted(folder.rglob(INDEX_FILES))
        if (why := _why_wrong(path)) is not None
    ]


def _why_wrong(path: Path) -> str | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        named = list(document["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        return f"expected an index with a weight_map, got one that is not ({error!r})"
    wrong = sorted({repr(name)[:100] for name in named if not _is_safetensors_beside(name)})
    if not wrong:
        return None
    return f"expected names of {ENDING} files in the index's own folder, got {', '.join(wrong[:5])}"


def _is_safetensors_beside(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(ENDING)
        and not name.startswith(".")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
    )
