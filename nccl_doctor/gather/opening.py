"""Opening of a run: rank 0 gives it a name, and all that is said in it has that name in its key.

The store of torchrun's agent outlives its ranks, and what an earlier start of them left there must
be neither believed nor waited for. No number tells the starts apart: each agent counts only the
restarts that its own ranks caused (TORCHELASTIC_RESTART_COUNT), and a host that joins an elastic
job restarts all ranks without any count. So the name alone tells, and who signed in for an earlier
run signs in again as soon as there is another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nccl_doctor.gather.control_store import (
    STRANGER_S,
    ControlStore,
    StoreLost,
    StoreTimeout,
)
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.launch import identity
from nccl_doctor.toolkit.host import text_of

PROTOCOL = "nccl-doctor/1"
MEETING = f"{PROTOCOL}/"
"""Prefix of what is said before a run is known: who is rank 0, and what the run is called."""

OPENING, _CLAIMS = "opening", "coordinators"
_LARGEST = 4096
_NAME_MAX = 64
_MOST_CLAIMS = 200
_LOOK_S = 0.5
"""Time between two looks of who has a key whether the run is opened with another one."""


def prefix_of(run_id: str) -> str:
    """Prefix of all keys of one run."""
    return f"{PROTOCOL}/{run_id}/"


def open_run(meeting: ControlStore, run_id: str) -> None:
    """Say, as rank 0, what the run is called; with a key also where those look who have another
    one, or none.
    """
    meeting.put(OPENING, {"run": run_id})
    if meeting.seal.secret is not None:
        meeting.public().put(OPENING, {"run": run_id})


def opened(
    meeting: ControlStore,
    patience_s: float,
    tick: Callable[[], None] = lambda: None,
    refused: Callable[[BadMessage], None] = lambda error: None,
) -> str:
    """Name of the run, once rank 0 has opened it.

    What is not rank 0's, or not in a form that is understood, may be a stranger's: it is `refused`,
    and rank 0 takes its place.

    Raises:
        StoreTimeout: it did not.
        BadMessage: only what was refused came.
    """
    until = time.monotonic() + patience_s
    public = meeting.public()
    error: BadMessage | None = None
    while True:
        left_s = max(0.0, until - time.monotonic())
        try:
            if meeting.seal.secret is None:
                return _name_of(meeting.get(OPENING, left_s, tick, _LARGEST))
            if meeting.wait([OPENING], min(left_s, _LOOK_S), tick):
                return _name_of(meeting.get(OPENING, left_s, tick, _LARGEST))
            if public.wait([OPENING], 0.0):
                _name_of(public.get(OPENING, 0.0, largest=_LARGEST))
        except BadMessage as found:
            error = found
            refused(found)
        except StoreLost:  # rank 0 has ended, and the store with it
            if error is None:
                raise
            raise error from None
        except StoreTimeout:
            if error is None and meeting.seal.secret is None:
                raise
        if time.monotonic() >= until:
            raise error or StoreTimeout(f"no run was opened in {patience_s:.1f} s")
        tick()
        time.sleep(STRANGER_S)


def _name_of(data: Any) -> str:
    if name := name_in(data):
        return name
    raise BadMessage("rank 0: opening has no name of a run", data)


def name_in(data: Any) -> str:
    """Name of the run that an opening tells, empty if it tells none."""
    name = data.get("run") if isinstance(data, dict) else None
    usable = isinstance(name, str) and name.isprintable() and len(name) <= _NAME_MAX
    return str(name) if usable else ""


def opened_again(meeting: ControlStore, run_id: str) -> bool:
    """Whether rank 0 has opened another run than this one."""
    with suppress(StoreTimeout, BadMessage):
        return opened(meeting, 0.0) != run_id
    return False


def claim(meeting: ControlStore) -> bool:
    """Claim to be rank 0. Returns whether another process that may still run did so before."""
    number = meeting.add(_CLAIMS, 1) - 1
    meeting.put(f"coordinator/{number}", _this_process())
    earlier = range(number) if number <= _MOST_CLAIMS else ()
    return number > _MOST_CLAIMS or not all(_is_gone(meeting, each) for each in earlier)


def close_run(meeting: ControlStore) -> None:
    """Clear, as rank 0, what was said before the run, for a later one in the same store."""
    claims = range(min(meeting.add(_CLAIMS, 0), _MOST_CLAIMS))
    meeting.forget([OPENING, _CLAIMS, "server", *(f"coordinator/{each}" for each in claims)])
    if meeting.seal.secret is not None:
        meeting.public().forget([OPENING])


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": _machine(), "pid": pid, "began": _began(pid)}


def _is_gone(meeting: ControlStore, number: int) -> bool:
    """True if the process of an earlier claim ran on this host, and does no more."""
    try:
        said = meeting.get(f"coordinator/{number}", 0.0, largest=_LARGEST)
        pid, began = int(said["pid"]), str(said["began"])
        return bool(said["host"] == _machine() and began and _began(pid) != began)
    except (StoreTimeout, ValueError, TypeError, KeyError):  # nothing is known of it
        return False


def _machine() -> str:
    """Key of this host and its process ids: below it, a process id means one process."""
    with suppress(OSError):
        return f"{identity.host_key()}|{os.stat('/proc/self/ns/pid').st_ino}"
    return identity.host_key()


def _began(pid: int) -> str:
    """Start of a process, in ticks since that of the kernel; empty if it does not run."""
    after_name = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return "" if not after_name or after_name[0] in "ZX" else after_name[19]
