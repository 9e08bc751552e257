"""Opening of a run: rank 0 gives it a name, and all that is said in it has that name in its key.

The store of torchrun's agent outlives its ranks, and what an earlier start of them left there must
be neither believed nor waited for. No number tells the starts apart: each agent counts only the
restarts that its own ranks caused (TORCHELASTIC_RESTART_COUNT), and a host that joins an elastic
job restarts all ranks without any count. So the name alone tells, and who signed in for an earlier
run signs in again as soon as there is another.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.store import STRANGER_S, ControlStore, StoreLost, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.system.shortage import soft_limit
from nccl_doctor.toolkit.host import host_name, text_of

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
    """True if rank 0 has opened another run than this one."""
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


# Proof that another rank 0 coordinates: a counter in the store is no proof, anybody can raise it.
#
# A rank 0 that finds the counter raised asks, with a token that nobody can know before; the
# coordinator answers while it waits for others. Without an answer, who asked coordinates; of
# several that ask at the same time it is the first one, which then answers the others. Question
# and answer are sealed with the key of the run, if there is one, and name the address at which
# both meet: the coordinator of another run answers another question. Questions that lay in the
# store when this rank 0 came are of an earlier start of the ranks: nobody waits for who asked
# them.


ANSWER_S = 5.0
"""Time for a coordinator to answer: it looks some times a second, unless it judges."""
ALL_DOUBT_S = 2.0
"""The same where somebody else asks too: perhaps there is none yet."""
SIGN_IN_S = 5.0
"""Time for who was answered to sign in."""
_RIVAL_LOOK_S = 0.25
_MOST = 1000


def another_coordinates(
    box: ControlStore, token: str, launch: Launch, patience_s: float, tick: Callable[[], None]
) -> bool:
    """True if a coordinator of this run answers at this store.

    Raises:
        StoreLost: the store broke off.
    """
    number = box.add("doubts", 1) - 1
    question = _question(token, launch)
    box.put(f"doubt/{number}", question)
    began, left = time.monotonic(), min(ANSWER_S, patience_s)
    while left > 0 and not box.wait([f"sure/{number}"], min(left, _RIVAL_LOOK_S), tick):
        waited = time.monotonic() - began
        left = min(ANSWER_S, patience_s) - waited
        if waited > ALL_DOUBT_S and box.add("doubts", 0) > number + 1:
            return False
    try:
        return bool(box.get(f"sure/{number}", 0.0, largest=_LARGEST) == question)
    except (StoreTimeout, BadMessage):
        return False


class RivalCheck:
    """Questions of others that are rank 0 too, as the coordinator answers them."""

    def __init__(self, meeting: ControlStore, launch: Launch, token: str) -> None:
        """Start with the next question: make it before this process claims to be rank 0, as others
        ask only after that. `token` is that of this one, which may ask too.
        """
        self._box = meeting
        self._asked: set[str] = set()
        self._own = token
        self._patience_ends = 0.0
        self._address = _question("", launch)["address"]
        self._first = self._answered = min(meeting.add("doubts", 0), _MOST)
        self._next = 0.0

    def awaits(self, tokens: Collection[str]) -> bool:
        """True if one that was answered is still to sign in, which is a fact; `tokens` have."""
        return time.monotonic() < self._patience_ends and bool(self._asked - set(tokens))

    def answer(self) -> None:
        """Look into the store, some times a second, and answer."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _RIVAL_LOOK_S
        box = self._box
        number = min(box.add("doubts", 0), _MOST)
        while self._answered < number and box.wait([f"doubt/{self._answered}"], 0.0):
            with suppress(BadMessage, StoreTimeout):
                asked = box.get(f"doubt/{self._answered}", 0.0, largest=_LARGEST)
                if isinstance(asked, dict) and asked.get("address") == self._address:
                    box.put(f"sure/{self._answered}", asked)
                    self._asked |= {str(asked.get("token"))} - {self._own}
                    self._patience_ends = now + SIGN_IN_S
            self._answered += 1

    def close(self) -> None:
        """Take what was said before the run out of the store: a later one counts from 0 again."""
        numbers = range(self._first, self._answered)
        questions = (f"{word}/{number}" for number in numbers for word in ("doubt", "sure"))
        self._box.forget(["doubts", *questions])
        close_run(self._box)


def _question(token: str, launch: Launch) -> dict[str, Any]:
    return {"token": token, "address": f"{launch.master_addr}:{launch.master_port}"}


# Whether this process alone claims its place in the job, among those that live on its host.
#
# A process that was killed as hosts signed in, and is started again, makes a second claim of one
# place. It is told from two that claim it at once by a name that the kernel gives to one socket
# only, and frees when its last holder ends: an abstract one, for all processes of one network
# namespace, in whatever container. A pod that is made anew has another one, but it has the name
# of the first, and two pods of one name do not live at once.


_held: list[socket.socket] = []
_FEW_FILES = 64
"""With fewer open files allowed, the sign-in needs every one of them."""


def alone_as(launch: Launch, environ: Mapping[str, str], key: str) -> str:
    """The place that no other living process here claims, with this host: of a rank, or of a host
    that has yet to start its ranks. Empty if another one does, if the kernel has no such names, or
    if few open files are allowed.

    It is held as long as this process lives.

    Args:
        launch: of this process.
        environ: unfiltered.
        key: `identity.host_key`.
    """
    host = launch.launcher == OWN and not launch.local_rank
    number = launch.node_rank if host else launch.rank
    files = soft_limit(resource.RLIMIT_NOFILE)
    few = files is not None and files < _FEW_FILES
    if few or (number is None and not host):
        return ""
    place = f"{'host' if host else 'rank'} {'' if number is None else number}"
    meeting = f"{launch.master_addr} {launch.master_port} {launch.run_id} {place}"
    name = hashlib.sha256(meeting.encode()).hexdigest()
    try:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return ""
    try:
        holder.bind(f"\0nccl-doctor {name}")
    except OSError:
        holder.close()
        return ""
    _held.append(holder)
    home = host_name() if "KUBERNETES_SERVICE_HOST" in environ else key
    return f"{place} of {home}"
