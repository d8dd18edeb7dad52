"""A headless Chromium that a test steers through its debugging protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import urllib3
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Tab:
    """A browser tab with its debugging connection.

    Attributes:
        errors: what the page has complained about so far: exceptions, errors on its console, and
            answers that could not be loaded.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command, and returns its answer."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(command))
        while True:
            message = json.loads(self._connection.recv(timeout=300))
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = json.dumps(message.get("params"))
        if message.get("method") == "Runtime.exceptionThrown" or '"error"' in told:
            self.errors.append(told)

    def value(self, expression: str) -> Any:
        """Evaluates a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 300) -> Any:
        """Waits until an expression is true, and returns its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.value(expression):
                return value
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds} s: {expression}; {self.errors}")

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the screen in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        """Returns the full page as PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """Opens an empty page in a new browser, and ends the browser afterwards."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    port_file = folder / "DevToolsActivePort"
    browser = subprocess.Popen(
        [CHROMIUM, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not port_file.exists() or not port_file.read_text():
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        pages = urllib3.request("GET", f"http://127.0.0.1:{port}/json/list").json()
        (page,) = [each for each in pages if each["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Tab(connection)
    finally:
        browser.terminate()
        browser.wait(300)
