"""A headless Chromium that tests steer, to see what a page does."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt-get install chromium"
)
_COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """A page in a headless Chromium that draws in software, steered through DevTools in real time.

    Chromium's own `--screenshot` with virtual time hangs now and then on a page that animates.
    """

    def __init__(self, page: str, profile: Path) -> None:
        assert CHROMIUM is not None
        options = (
            "--headless=new",
            "--no-sandbox",
            "--use-angle=swiftshader",
            "--enable-unsafe-swiftshader",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--window-size=800,700",
        )
        null = subprocess.DEVNULL
        self.process = subprocess.Popen([CHROMIUM, *options, page], stdout=null, stderr=null)
        port = profile / "DevToolsActivePort"
        wait_until(lambda: port.exists() and port.read_text().count("\n"), "Chromium listens")
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json"
        with urllib.request.urlopen(address, timeout=30) as answer:
            targets = json.load(answer)
        pages = (target for target in targets if target["type"] == "page")
        self.address, self.calls = next(pages)["webSocketDebuggerUrl"], 0

    def call(self, method: str, **parameters) -> dict:
        """Calls a method of DevTools."""
        self.calls += 1
        with connect(self.address, max_size=None) as socket:
            socket.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
            while (answer := json.loads(socket.recv(timeout=60))).get("id") != self.calls:
                pass
        return answer.get("result", {})  # nothing while a page is being loaded

    def evaluate(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result.get("result", {}).get("value")

    def complaints(self) -> list[dict]:
        """Lists what the page has written to the console so far, its exceptions, and what it was refused."""
        heard = []
        with connect(self.address, max_size=None) as socket:
            # Each tells first what there was before; the answer to the last call comes after that.
            for number, method in enumerate(("Log.enable", "Runtime.enable", "Runtime.disable")):
                socket.send(json.dumps({"id": number, "method": method}))
            while (message := json.loads(socket.recv(timeout=60))).get("id") != 2:
                if message.get("method") in _COMPLAINTS:
                    heard.append(message["params"])
        return heard

    def text(self, name: str) -> str:
        return self.evaluate(f"document.getElementById({name!r}).textContent")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, f"a minute went by before: {what}"
        time.sleep(0.1)
