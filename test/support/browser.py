"""A headless Chromium for tests of pages, without requests to the network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium_path() -> str | None:
    """Return the path of a Chromium: that of the variable CHROMIUM, or one of NAMES."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started_browser() -> Iterator["Browser"]:
    """Start a browser for the block; skip the test without one."""
    path = chromium_path()
    if path is None:
        pytest.skip("no browser: install chromium (apt-get install chromium), or set CHROMIUM=PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
