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
        shown = range(min(len(self.ids), SHOWN_ROWS))
        blocks = "".join(self._of_query(number, samples, queries) for number in shown)
        left = len(self.ids) - len(shown)
        more = f'<div style="{_SOFT}">and {left:,} more queries</div>' if left else ""
        return Html(blocks + more, title="What a query found")

    def _of_query(self, number: int, samples: Any, queries: Any) -> str:
        scores = [float(score) for score in self.scores[number]]
        largest = max(map(abs, scores), default=0.0) or 1.0
        items = [
            _item(None if samples is None else samples[one], f"{one}: {score:.4g}", score / largest)
            for one, score in zip(self.ids[number], scores, strict=True)
        ]
        query = None if queries is None else queries[number]
        asked = _item(query, f"loss {float(self.losses[number]):.4g}", 0)
        cut = len(items) - self.num_smallest
        groups = {f"Query {number}": [asked], "Most helpful": items[:cut]}
        groups |= {"Most harmful": items[cut:]} if self.num_smallest else {}
        blocks = "".join(
            f'<div><div style="{_SOFT}">{title}</div>'
            f'<div style="{_ITEMS}">{"".join(of)}</div></div>'
            for title, of in groups.items()
        )
        return f'<div style="{_ROW}">{blocks}</div>'


def _item(sample: Any, caption: str, share: float) -> str:
    """Return a sample, its caption, and a bar of its share of the largest score, -1 to 1."""
    colour, width = HELPS if share > 0 else HARMS, round(100 * abs(share))
    bar = f'<div style="height:5px;width:{width}%;background:{colour};margin:3px 0"></div>'
    return f'<div style="{_ITEM}">{_content(sample)}{bar}<div>{escaped(caption)}</div></div>'


def _content(sample: Any) -> str:
    """Return a sample as HTML: texts and numbers escaped, images inline."""
    if sample is None:
        return ""
    if isinstance(sample, str | int | float):
        return f"<div>{escaped(sample)}</div>"
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, tuple | list):
        return "".join(map(_content, sample))
    if hasattr(sample, "detach"):  # NumPy has no bfloat16
        sample = sample.detach().cpu()
        sample = sample.float() if sample.is_floating_point() else sample
    image = np.asarray(sample)
    if image.ndim == 3 and image.shape[0] in (1, 3, 4) and image.shape[2] not in (3, 4):
        image = image.transpose(1, 2, 0)
    if image.ndim == 2:
        image = image[:, :, None]
    if image.dtype.kind in "buif" and image.ndim == 0:
        return _content(image.item())
    if image.dtype.kind not in "buif" or image.ndim != 3 or image.shape[2] not in (1, 3, 4):
        raise InvalidInputs(
            f"expected a text, an image of shape (H, W), (C, H, W) or (H, W, C), or several of "
            f"these, got {type(sample).__name__} of shape {image.shape}"
        )
    png = base64.b64encode(_png(image)).decode()
    return f'<img alt="" style="{_IMAGE}" src="data:image/png;base64,{png}">'


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
