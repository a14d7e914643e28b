"""One browser a process, one real box and one staged one; a page of its own for each test.

Chromium is Debian's, driven by Playwright's Python driver: one wheel of PyPI that takes a browser
as it finds it, waits for what is to appear by itself, and downloads nothing. `make browser` fetches
Chromium where it may; without it these tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.boxes import TestBox, running_box
from tests.dashboard.staged import Staged, busy_day, staged

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# A token that is refused is meant to be: the browser notes the answer's status by itself.
EXPECTED = "the server responded with a status of 401"
DESK, PHONE = (1280, 860), (390, 844)
# How long a page may take to show something, on whatever machine.
WITHIN_MS = 60_000
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def box(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    """A box by `gradbox up`, with a model that takes its time and one that cannot."""
    folder = tmp_path_factory.mktemp("dashboard")
    source = Path(__file__).parents[1] / "client" / "zoo.py"
    models = folder / "models.toml"
    models.write_text(f'[models.slow]\nbuilder = "python"\nsource = "{source}:slow"\n')
    with running_box(folder / "data", models=models) as found:
        yield found


@pytest.fixture(scope="session")
def busy(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    """A service with a busy day behind it."""
    with staged(tmp_path_factory.mktemp("busy")) as found:
        busy_day(found.backing)
        yield found
