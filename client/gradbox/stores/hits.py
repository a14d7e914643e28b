"""What a query found, and the page that shows it: each query beside the samples that were found."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gradbox.errors import InvalidInputs
from gradbox.html import SHOWN_ROWS, Html, escaped
from gradbox.stores.jobs import Id
from gradbox.tensors.tensor_bytes import is_tensor

# A larger image is shown by every second, third, … of its pixels.
MOST_PIXELS: Final = 160
# Which are read on a light page and on a dark one.
HELPS: Final = "#1a9988"
HARMS: Final = "#d9622b"

_ROW: Final = "display:flex;flex-wrap:wrap;gap:10px 28px;margin:0 0 18px"
_ITEMS: Final = "display:flex;flex-wrap:wrap;gap:10px"
_ITEM: Final = "width:112px;font-size:12px;overflow-wrap:anywhere"
_SOFT: Final = "opacity:0.75;margin-bottom:3px"
_IMAGE: Final = "height:72px;max-width:112px;image-rendering:pixelated;display:block"


@dataclass(frozen=True)
class Hits:
    """What a query found.

    Attributes:
        ids: for each query, those of the rows with the largest scores, largest first; behind them
            those with the smallest, where `bottom` asked for them.
        scores: of these, (Q, k).
        rows: which rows of the store they are, (Q, k).
        losses: of the queries, (Q,).
        manifest: the receipt.
        num_smallest: how many of the k are there for their small scores.
    """

    ids: list[list[Id]]
    scores: Any
    rows: Any
    losses: Any
    manifest: Any
    num_smallest: int = 0

    def _repr_html_(self) -> str:
        return self.html()._repr_html_()

    def html(self, samples: Any = None, *, queries: Any = None) -> Html:
        """Return a page that shows the first queries, and beside each the samples that were found.

            hits.html(images, queries=test_images)                      # a notebook shows it
            Path("hits.html").write_text(hits.html(dataset, queries=tests))

        Args:
            samples: `samples[id]` is a text, an image (H, W), (C, H, W) or (H, W, C), or several of
                these in a tuple, a list or a dict: a data set, for example. None shows ids alone.
            queries: the same, by number.

        Raises:
            InvalidInputs: a sample is none of these.
        """
        scores = np.asarray(self.scores, dtype=np.float64)
        shown = [
            self._of_query(
                number,
                row / max(np.abs(row).max(initial=0), np.finfo(np.float64).tiny),
                samples=samples,
                queries=queries,
            )
            for number, row in enumerate(scores[:SHOWN_ROWS])
        ]
        left = len(scores) - len(shown)
        more = f'<div style="{_SOFT}">and {left:,} more queries</div>' if left > 0 else ""
        return Html("".join(shown) + more, title="What a query found")

    def _of_query(self, number: int, shares: Any, *, samples: Any, queries: Any) -> str:
        """Return a query and its samples; `shares` (k,) are how long their bars are."""
        items = [
            _item(_at(samples, one, "samples"), f"{one}: {score:.4g}", float(share))
            for one, score, share in zip(
                self.ids[number], self.scores[number].tolist(), shares, strict=True
            )
        ]
        cut = len(items) - self.num_smallest
        asked = _item(_at(queries, number, "queries"), f"loss {float(self.losses[number]):.4g}")
        groups = [(f"Query {number}", [asked]), ("Most helpful", items[:cut])]
        groups.append(("Most harmful", items[cut:]))
        blocks = "".join(
            f'<div><div style="{_SOFT}">{title}</div>'
            f'<div style="{_ITEMS}">{"".join(of)}</div></div>'
            for title, of in groups
            if of
        )
        return f'<div style="{_ROW}">{blocks}</div>'


def _item(content: str, caption: str, share: float | None = None) -> str:
    """Return a sample with its caption, and a bar of its share of the largest score, -1 to 1."""
    bar = ""
    if share is not None:
        colour, width = HELPS if share > 0 else HARMS, round(100 * abs(share))
        bar = f'<div style="height:5px;width:{width}%;background:{colour};margin:3px 0"></div>'
    return f'<div style="{_ITEM}">{content}{bar}<div>{escaped(caption)}</div></div>'


def _at(given: Any, key: Any, where: str) -> str:
    """Return what is shown of `given[key]`."""
    return "" if given is None else _content(given[key], f"{where}[{key!r}]")


def _content(sample: Any, where: str) -> str:
    """Return a sample as HTML: texts and numbers escaped, images inline."""
    if isinstance(sample, str | int | float):
        return f"<div>{escaped(sample)}</div>"
    if isinstance(sample, Mapping):
        return "".join(_content(one, f"{where}[{name!r}]") for name, one in sample.items())
    if isinstance(sample, tuple | list):
        return "".join(_content(one, f"{where}[{at}]") for at, one in enumerate(sample))
    image = _array(sample)
    if image.ndim == 0 and image.dtype.kind in "buif":
        return _content(image.item(), where)
    if image.ndim == 3 and image.shape[0] in (1, 3, 4) and image.shape[2] not in (3, 4):
        image = image.transpose(1, 2, 0)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or image.dtype.kind not in "buif":
        raise InvalidInputs(
            f"{where}: expected a text, an image of shape (H, W), (C, H, W) or (H, W, C), or "
            f"several of these, got {type(sample).__name__} of shape {image.shape}"
        )
    png = base64.b64encode(_png(image)).decode()
    return f'<img alt="" style="{_IMAGE}" src="data:image/png;base64,{png}">'


def _array(sample: Any) -> Any:
    """Return a tensor or an image of another library as an array; NumPy has no bfloat16."""
    if is_tensor(sample) and not isinstance(sample, np.ndarray | np.generic):
        sample = sample.detach().cpu()
        sample = sample.float() if sample.is_floating_point() else sample
    return np.asarray(sample)


def _png(image: Any) -> bytes:
    """Return an image (H, W, 1, 3 or 4) as PNG, scaled from 0 … 1 or the numbers beyond it."""
    step = -(-max(image.shape[:2]) // MOST_PIXELS) or 1
    image = image[::step, ::step]
    if image.dtype != np.uint8:
        image = np.nan_to_num(image.astype(np.float64))
        low, high = min(0.0, image.min(initial=0)), max(1.0, image.max(initial=1))
        image = np.rint((image - low) * (255 / (high - low))).astype(np.uint8)
    height, width, channels = image.shape
    # Each line begins with its filter, 0: none.
    lines = np.pad(image.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    kind = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
