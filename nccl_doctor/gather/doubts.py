"""Proof that another rank 0 coordinates: a counter in the store is no proof, anybody can raise it.

A rank 0 that finds the counter raised asks, with a token that nobody can know before; the
coordinator answers while it waits for others. Without an answer, who asked coordinates; of several
that ask at the same time it is the first one, which then answers the others. Question and answer
are sealed with the key of the run, if there is one, and name the address at which both meet: the
coordinator of another run answers another question. Questions that lay in the store when this rank
0 came are of an earlier start of the ranks: nobody waits for who asked them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from nccl_doctor.gather.control_store import ControlStore, StoreTimeout
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.opening import close_run
from nccl_doctor.model.launch import Launch

ANSWER_S = 5.0
"""Time for a coordinator to answer: it looks some times a second, unless it judges."""
ALL_DOUBT_S = 2.0
"""The same where somebody else asks too: perhaps there is none yet."""
SIGN_IN_S = 5.0
"""Time for who was answered to sign in."""
_LOOK_S = 0.25
_MOST = 1000
_LARGEST = 4096


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
    while left > 0 and not box.wait([f"sure/{number}"], min(left, _LOOK_S), tick):
        waited = time.monotonic() - began
        left = min(ANSWER_S, patience_s) - waited
        if waited > ALL_DOUBT_S and box.add("doubts", 0) > number + 1:
            return False
    try:
        return bool(box.get(f"sure/{number}", 0.0, largest=_LARGEST) == question)
    except (StoreTimeout, BadMessage):
        return False


class Doubts:
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
        """Whether one that was answered is still to sign in, which is a fact; `tokens` have."""
        return time.monotonic() < self._patience_ends and bool(self._asked - set(tokens))

    def answer(self) -> None:
        """Look into the store, some times a second, and answer."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
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
