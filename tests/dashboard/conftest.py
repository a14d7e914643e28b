"""One browser a process, one real box and one staged one; a page of its own for each test.

Chromium is Debian's, driven by Playwright's Python driver: one wheel of PyPI that takes a browser
as it finds it, waits for what is to appear by itself, and downloads nothing. `make browser` fetches
Chromium where it may; without it these tests are skipped.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.boxes import TestBox, running_box
from tests.dashboard.staged import Staged, busy_day, staged
from tests.device import DEVICE
from tests.pages import write_files

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--renderer-process-limit=1",  # a process for each page takes a sixth more processor time
]
# A token that is refused is meant to be: the browser notes the answer's status by itself.
EXPECTED = "the server responded with a status of 401"
DESK, PHONE = (1280, 860), (390, 844)
# How long a page may take to show something, on whatever machine.
WITHIN_MS = 60_000
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: `make browser` fetches Debian's as root, or install one")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@dataclass
class Visit:
    """A page of a browser of its own, and what went wrong on it."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)

    def log_in(self, token: str, view: str = "") -> Page:
        """Log in with a token and open a view."""
        self.page.goto(f"{self.url}/#/{view}")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Log in").click()
        self.page.get_by_text("live", exact=True).wait_for()
        return self.page


Open = Callable[..., Visit]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages; at the end, none may have had an error, a violation of its policy included."""
    contexts: list[BrowserContext] = []
    visits: list[Visit] = []

    def open_one(url: str, *, size: tuple[int, int] = DESK, **given: Any) -> Visit:
        viewport: Any = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, reduced_motion="reduce", **given)
        context.set_default_timeout(WITHIN_MS)
        contexts.append(context)
        visit = Visit(context.new_page(), url)
        visit.page.on("pageerror", lambda error: visit.wrong.append(str(error)))
        visit.page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning")
                and EXPECTED not in message.text
                and visit.wrong.append(message.text)
            ),
        )
        visits.append(visit)
        return visit

    yield open_one
    for context in contexts:
        context.close()
    assert [visit.wrong for visit in visits if visit.wrong] == []


@pytest.fixture(scope="package")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a page that is no box's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "index.html").write_text('<!doctype html><link rel="icon" href="data:,">')
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="package")
def box(
    browser: Browser, elsewhere: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestBox]:
    """A box by `gradbox up`, with a model that takes its time and the tutorial's.

    Pages of `elsewhere` may call it.
    """
    folder = tmp_path_factory.mktemp("dashboard")
    source = Path(__file__).parents[1] / "client" / "zoo.py"
    models = folder / "models.toml"
    entries = [f'[models.slow]\nbuilder = "python"\nsource = "{source}:slow"\n']
    models.write_text("\n".join(entries + write_files("docs/tutorial.md", folder)))
    arguments = ("--device", str(DEVICE), "--cors-origin", elsewhere)
    with running_box(folder / "data", models=models, arguments=arguments) as found:
        yield found


@pytest.fixture(scope="package")
def busy(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    """A service with a busy day behind it."""
    with staged(tmp_path_factory.mktemp("busy")) as found:
        busy_day(found.backing)
        yield found
