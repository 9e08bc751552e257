"""Other end of --hostfile: this process was started over ssh, and answers on its stdout.

It announces itself, reads one line that says what to do, and from then on ends as soon as its
standard input closes: then whoever asked is gone, or wants it to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from nccl_doctor import __version__
from nccl_doctor.launch.ssh import exports
from nccl_doctor.model.options import Options

MARKER = "nccl-doctor relay: ready, version "
"""Begin of the line on stderr that shows the other end that this process has started."""
MORE = "nccl-doctor relay: seconds more for this run: "
"""Begin of the line on stderr that tells the other end to wait longer."""

_AGAIN_S = 1.0


def tell_more(seconds: int) -> None:
    """Tell the other end that the run ends so much later."""
    sys.stderr.write(f"{MORE}{seconds}\n")
    sys.stderr.flush()


def instructions(options: Options, variables: Mapping[str, str], secret: bytes = b"") -> str:
    """The line that a relay waits for; `secret` is what all hosts of the run share."""
    line = {"options": options.to_json(), "variables": dict(variables), "secret": secret.hex()}
    return json.dumps(line) + "\n"


def attend() -> tuple[Options, bytes]:
    """Announce this process, wait for the options, set the variables, and watch the connection.

    Returns: the options of the run, and its secret.

    Raises:
        ValueError: what came is not the line that `instructions` makes.
        EOFError: the line closed before.
    """
    sys.stderr.write(f"{MARKER}{__version__}\n")
    sys.stderr.flush()
    given = _first_line()
    options = Options.from_json(given["options"])
    secret = bytes.fromhex(given["secret"])
    exports.apply(given["variables"])
    threading.Thread(target=_watch, name="relay", daemon=True).start()
    return options, secret


def _first_line() -> Any:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 1 << 16)  # not through sys.stdin: nothing else must be taken
        if not more:
            raise EOFError
        data += more
    return json.loads(data)


def _watch() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    while True:  # again: the handlers of a process that is starting its ranks may not be set yet
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_AGAIN_S)
