"""Takes docs/dashboard.png: the overview on a busy day, as the box's owner sees it.

    python -m tests.dashboard [THEME]

Inter looks as intended where it is installed (Debian: fonts-inter).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.dashboard.conftest import ARGUMENTS, CHROMIUM
from tests.dashboard.staged import busy_day, staged

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "dashboard.png"


def main(theme: str) -> None:
    with tempfile.TemporaryDirectory() as folder, staged(Path(folder)) as box:
        busy_day(box.backing)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page(
                viewport={"width": 1240, "height": 900},
                device_scale_factor=1.5,
                color_scheme="dark" if theme == "dark" else "light",
                reduced_motion="reduce",
            )
            page.goto(box.url)
            page.get_by_label("Token").fill(box.owner_token)
            page.get_by_role("button", name="Log in").click()
            page.get_by_text("begins in about").first.wait_for()
            page.screenshot(path=PICTURE)
            browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "light")
