"""The child's end of the pipe to the process that forked it: messages, each as JSON on one line."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from nccl_doctor.system.masking import is_plain, masked, masked_data

_SHORT = 400
"""Characters of a message that cannot be nested too deep."""


class ChildLine:
    """The child's end of the pipe; whole messages, from any thread. No secret leaves the child."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """One message: `{"facts"}`, `{"crumb"}`, …"""
        data = memoryview(_encoded(message) + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._pipe, data) :]

    def breadcrumb(self, step: str, **details: Any) -> None:
        """Say what comes next, before it may block."""
        at_s = round(time.monotonic() - self._started, 4)
        self.send({"crumb": {"step": step, "at_s": at_s, **details}})

    def witness(self, name: str, value: Any) -> None:
        """Say something of this child's own state; the last value of a name holds."""
        self.send({"witness": {name: json.loads(json.dumps(value, default=str))}})

    def so_far(self, facts: Mapping[str, Any]) -> None:
        """Say what is known; the last one is the answer of a child that gives no other in time."""
        self.send({"so_far": facts})


class NoLine(ChildLine):
    """Line of work that is done in the process of the parent, where no message is read."""

    def __init__(self) -> None:
        super().__init__(-1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send nothing."""


def _encoded(message: Mapping[str, Any]) -> bytes:
    # There may be a thousand breadcrumbs, and none of them has anything to mask.
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(message)
        if len(text) <= _SHORT and is_plain(text):
            return text.encode()
    return json.dumps(sendable(message)).encode()


def sendable(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as JSON can carry it, without secrets; or that it cannot."""
    try:
        return dict(masked_data(json.loads(json.dumps(message))))
    except (TypeError, ValueError, RecursionError) as error:
        return {"raised": f"the facts are not JSON: {masked(str(error))}"}
