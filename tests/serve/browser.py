"""A real Chromium without a window, driven by its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--force-color-profile=srgb"),
)
PATIENCE = 90.0
"""Seconds: the machines are shared."""
CALM = {"max_size": None, "open_timeout": PATIENCE, "ping_interval": None, "proxy": None}
"""No pings: a browser that is slow to answer one is busy, not gone."""


class Browser:
    """One page. `with Browser() as browser: browser.open(url)`"""

    def __enter__(self):
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program, "chromium is missing: apt-get install -y chromium (Debian's package), as .ci/run does"
        self._profile = tempfile.mkdtemp(prefix="fedprotip-chromium-")
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port, path = self._wait(self._address)
            self._line = connect(f"ws://127.0.0.1:{port}{path}", **CALM)
            self._socket = self._line.__enter__()
            self._count, self.messages, self._session = 0, [], None
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "DOM", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        if hasattr(self, "_socket"):
            self._line.__exit__(None, None, None)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _address(self):
        assert self._process.poll() is None, "chromium ended at once"
        file = Path(self._profile) / "DevToolsActivePort"
        lines = file.read_text().split() if file.exists() else []
        return lines if len(lines) == 2 else None

    def call(self, method, _patience=PATIENCE, **parameters):
        """One command and its result; events that come in between are kept."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": parameters}
        self._socket.send(json.dumps(asked | ({"sessionId": self._session} if self._session else {})))
        while True:
            told = json.loads(self._socket.recv(timeout=_patience))
            if told.get("id") == self._count:
                assert "error" not in told, told
                return told["result"]
            self.messages.append(told)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, code):
        told = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, code):
        """Wait until an expression is true; what it is then."""
        return self._wait(lambda: self.evaluate(code))

    def choose(self, selector, *paths):
        """Put files into an input, as a person does with the dialogue of the system."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def drop(self, selector, *paths):
        """Drag files from elsewhere onto a node and let them go."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        place = {"x": self.evaluate(f"{box}.x + {box}.width / 2"), "y": self.evaluate(f"{box}.y + {box}.height / 2")}
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, data=data, **place)

    def press(self, key):
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def size(self, width, height, scale=1, mobile=False):
        more = {"deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **more)

    def screenshot(self, path):
        """Of the whole page. On a busy machine headless Chromium may wait for a frame that never comes: ask again."""

        def taken(patience):
            self.call("Page.bringToFront")
            return self.call("Page.captureScreenshot", patience, format="png", captureBeyondViewport=True)

        try:
            found = taken(20)
        except TimeoutError:
            found = taken(PATIENCE)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def complaints(self):
        """What the browser has refused or logged as an error so far."""
        self.evaluate("0")
        logged = [one["params"]["entry"] for one in self.messages if one.get("method") == "Log.entryAdded"]
        thrown = [one["params"] for one in self.messages if one.get("method") == "Runtime.exceptionThrown"]
        return [one["text"] for one in logged if one["level"] == "error"] + thrown

    def requested(self):
        """Addresses of all requests so far."""
        self.evaluate("0")
        sent = [one for one in self.messages if one.get("method") == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]

    def _wait(self, found):
        until = time.monotonic() + PATIENCE
        while not (value := found()):
            assert time.monotonic() < until, "the page did not get there"
            time.sleep(0.05)
        return value
