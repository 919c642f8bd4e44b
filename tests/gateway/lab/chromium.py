"""A headless Chromium of this machine for tests; they skip where there is none."""

import contextlib
import importlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
_QUIET = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
)
TIMEOUT_MS = 100_000


class Chromium:
    """Owner of one browser and of what its pages complained about. Context manager."""

    def __init__(self, executable: str, playwright: Any) -> None:
        self._playwright = playwright
        self._browser = playwright.chromium.launch(executable_path=executable, args=list(_QUIET))
        self.complaints: list[str] = []

    def close(self) -> None:
        """Ends it."""
        self._browser.close()

    @contextlib.contextmanager
    def page(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 800) -> Iterator[Any]:
        """A page of its own context at `url`; what it complains about is an error of the test."""
        scheme = "dark" if dark else "light"
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        try:
            page.goto(url)
            yield page
            assert self.complaints == []
        finally:
            self.complaints.clear()
            context.close()


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """The browser; skips, and says what to install, where it or its driver is missing.

    To be closed before the next test of another kind: the driver keeps an event loop in this thread meanwhile.
    """
    executable = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    try:
        api = importlib.import_module("playwright.sync_api")
    except ImportError:
        pytest.skip("playwright is not installed: make setup")
    with api.sync_playwright() as playwright:
        browser = Chromium(executable, playwright)
        try:
            yield browser
        finally:
            browser.close()
