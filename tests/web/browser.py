"""Headless Chromium for the tests of the page: Debian's, driven by its own ChromeDriver."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
"""A browser that asks nobody but the page's own service."""


def require_chromium() -> tuple[str, str]:
    """Paths of browser and driver. Skips the test where a developer has none; fails it in continuous integration."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    words = "chromium or chromedriver is not installed: apt-get install chromium chromium-driver"
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own, which is ended at the end."""
    browser, driver = require_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        made = webdriver.Chrome(options=options, service=Service(driver))
        made.set_script_timeout(20)
        try:
            yield made
        finally:
            made.quit()


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """Gives the page a screen of this size, phones' included, in CSS pixels."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def prefer(driver: webdriver.Chrome, **features: str) -> None:
    """Sets media features, such as ``color_scheme="dark"``."""
    named = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})


def complaints(driver: webdriver.Chrome) -> list[dict[str, Any]]:
    """What the console has said since the last call: errors and warnings."""
    return [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
