"""The page of a query: texts and images beside it, escaped, and drawn by a browser."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradbox import InvalidInputs
from gradbox.stores import Hits

HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def hits(num_queries: int = 2) -> Hits:
    scores = torch.tensor([[4.0, 1.0, -2.0]]).repeat(num_queries, 1)
    ids: list[Any] = [["b", HOSTILE, "a"] for _ in range(num_queries)]
    losses = torch.ones(num_queries)
    return Hits(ids, scores, torch.zeros(num_queries, 3), losses, manifest=None, num_smallest=1)


class Parts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert {name for name, _ in attrs} <= {"style", "src", "alt", "charset", "lang"}
        self.images += [str(value) for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_texts_are_escaped_and_captioned() -> None:
    samples = {"a": HOSTILE, "b": {"text": "plain", "label": 3}, HOSTILE: ("x", np.int64(7))}
    shown = hits(20).html(samples, queries=[HOSTILE] * 20)
    parts = Parts(shown)
    assert not {"script", "img"} & set(parts.tags)
    assert not {"\x1b", "\u202e"} & set(shown)
    for text in (
        "<script>",
        "Most helpful",
        "Most harmful",
        "b: 4",
        "a: -2",
        "plain",
        "and 8 more",
    ):
        assert text in parts.text
    assert shown.startswith("<!doctype html>")
    assert shown._repr_html_() in shown
    assert "html" not in Parts(shown._repr_html_()).tags
    assert "b: 4" in Parts(hits()._repr_html_()).text


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(8, 8),
        torch.rand(3, 8, 8, dtype=torch.bfloat16),
        np.full((8, 8, 3), 200, np.uint8),
        torch.randn(1, 700, 400),
    ],
    ids=["grey", "channels first", "channels last", "large"],
)
def test_images_are_inline_and_small(image: Any) -> None:
    shown = hits().html(dict.fromkeys(["a", "b", HOSTILE], image))
    images = Parts(shown).images
    assert len(images) == 6
    assert all(source.startswith("data:image/png;base64,") for source in images)
    assert len(shown) < 300_000


@pytest.mark.parametrize("sample", [object(), torch.ones(5), torch.ones(2, 2, 2, 2)])
def test_what_is_neither_text_nor_image_is_refused(sample: Any) -> None:
    with pytest.raises(InvalidInputs, match="expected a text, an image"):
        hits().html(queries=[sample] * 2)


@pytest.mark.skipif(CHROMIUM is None, reason="expected chromium on the PATH")
@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_a_browser_shows_the_page_of_a_file(tmp_path: Path, scheme: Any) -> None:
    from playwright.sync_api import sync_playwright

    grey = np.array([[0, 64], [128, 255]], np.uint8)
    file = tmp_path / "hits.html"
    file.write_text(hits().html({"a": grey, "b": "text", HOSTILE: HOSTILE}, queries=[grey] * 2))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        page.goto(file.as_uri())
        assert page.get_by_text("<script>alert(1)</script>").count() == 4
        pixels = page.locator("img").first.evaluate(
            "async (image) => { await image.decode(); const canvas = document.createElement("
            "'canvas').getContext('2d'); canvas.drawImage(image, 0, 0);"
            " return [...canvas.getImageData(0, 0, 2, 2).data].filter((_, at) => at % 4 == 0) }"
        )
        assert pixels == [0, 64, 128, 255]
        browser.close()
