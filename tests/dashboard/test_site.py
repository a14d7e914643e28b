"""The site, built and served: its landing page, its search, and what programs read of it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.boxes import ROOT
from tests.dashboard.conftest import PHONE, Open
from tests.pages import pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site: a link, an anchor or a name that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_reference_is_made_of_the_sources(site: Path) -> None:
    assert "gradbox.client.GradClient.submit" in (site / "reference" / "client.html").read_text()
    assert "/v1/losses" in (site / "reference" / "http.html").read_text()


def test_llms_txt_lists_every_page_with_what_it_says(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.M)
    assert {*listed} == {
        page.removeprefix("docs/").replace(".md", ".html")
        for page in pages()
        if page != "README.md"
    }
    assert [page for page in listed if not (site / page).is_file()] == []
    assert text.startswith("# gradbox\n\n> ")


@pytest.mark.parametrize("size", [(1280, 900), PHONE], ids=["desk", "phone"])
def test_the_landing_page_says_what_it_is_once(
    open_page: Open, url: str, size: tuple[int, int]
) -> None:
    page = open_page(url, size=size).page
    page.goto(f"{url}/index.html")
    expect(page.locator("h1:visible")).to_have_count(1)
    figure = page.locator(".gb-figure img")
    assert figure.evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.get_by_role("link", name="What comes back").click()
    expect(page.get_by_role("heading", name="Examples")).to_be_visible()


def test_the_site_is_searched_where_it_is_served(open_page: Open, url: str) -> None:
    page = open_page(url).page
    page.goto(f"{url}/index.html")
    page.get_by_placeholder("Search").click()
    page.get_by_placeholder("Search").press_sequentially("cotangent")
    expect(page.locator(".md-search-result__item").first).to_be_visible()
    page.locator(".md-search-result__link").first.click()
    expect(page).to_have_url(re.compile(r"\.html"))
