"""A Chromium without windows, told what to do over a pipe by the DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
TIME_LIMIT_S = 60
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-first-run",
)
_PLACED = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
"""Chromium looks for commands at descriptor 3, and leaves its answers at 4."""


def browser() -> list[str]:
    """The command of a browser without a window."""
    for name in (*BROWSERS, *SHELLS):
        if path := shutil.which(name):
            return [path] if name in SHELLS else [path, "--headless=new"]
    pytest.skip("there is no Chromium (scripts/browser_tools.sh installs one as root on Debian)")


def environment(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


class Chromium:
    """One browser, as a context manager; each tab has its own emulation."""

    def __init__(self, folder: Path) -> None:
        self._command = [*browser(), *OPTIONS, f"--user-data-dir={folder / 'profile'}"]
        self._env = environment(folder)

    def __enter__(self) -> Chromium:
        self._process = subprocess.Popen(
            ["sh", "-c", _PLACED, "sh", *self._command, "--remote-debugging-pipe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._out, self._in = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIME_LIMIT_S
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str, session: str, **params: str) -> None:
        """Return once there was an event with these values."""
        end = time.monotonic() + TIME_LIMIT_S
        while not any(
            (event.get("method"), event.get("sessionId")) == (method, session)
            and params.items() <= event["params"].items()
            for event in self.events
        ):
            self.events.append(self._read(end))

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, f"Chromium says nothing more; it ended with {self._process.poll()}"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session)


class Tab:
    """A page that is loaded, and what happens in it."""

    def __init__(self, chromium: Chromium, session: str) -> None:
        self._chromium = chromium
        self._session = session
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._chromium.call(method, self._session, **params)

    def prefers(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def is_phone(self, width: int, height: int) -> None:
        """A screen of so many CSS pixels, with a viewport that the page itself asks for."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=3,
            mobile=True,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)

    def has_no_script(self) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=True)

    def open(self, file: Path) -> None:
        loader = self.call("Page.navigate", url=file.as_uri())["loaderId"]
        event = "Page.lifecycleEvent"
        self._chromium.wait_for(event, self._session, loaderId=loader, name="load")

    def run(self, code: str) -> Any:
        """The value of an expression of JavaScript, whether or not the page may run any."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def picture(self) -> str:
        """A screenshot: PNG in base64."""
        return str(self.call("Page.captureScreenshot", format="png")["data"])

    def requests(self) -> list[str]:
        """What it asked for, from wherever: URLs."""
        return [str(e["request"]["url"]) for e in self._events("Network.requestWillBeSent")]

    def words(self) -> Sequence[Mapping[str, Any]]:
        """What stands on the console: messages, exceptions, and what the browser complains of."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for name in names for event in self._events(name)]

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._chromium.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]
