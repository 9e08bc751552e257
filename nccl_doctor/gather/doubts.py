"""Proof that another rank 0 coordinates: a counter in the store is no proof, anybody can raise it.

A rank 0 that finds the counter raised asks, with a token that nobody can know before; the
coordinator answers while it waits for others. Without an answer, who asked coordinates; of several
that ask at the same time it is the first one, which then answers the others. Question and answer
are sealed with the key of the run, if there is one, and name the address at which both meet: the
coordinator of another run answers another question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from nccl_doctor.gather.control_store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.envelope import BadMessage, Seal
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

    def __init__(self, box: ControlStore, launch: Launch, seal: Seal, token: str) -> None:
        """`seal` is that of messages of participants that do not know this run yet; `token` that of
        this one, which may have asked too.
        """
        self._box = box
        self._seal = seal
        self._asked: set[str] = set()
        self._own = token
        self._patience_ends = 0.0
        self._address = _question("", launch)["address"]
        self._answered = 0
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
            mine, box.seal = box.seal, self._seal
            try:
                with suppress(BadMessage, StoreTimeout):
                    asked = box.get(f"doubt/{self._answered}", OPERATION_S, largest=_LARGEST)
                    if isinstance(asked, dict) and asked.get("address") == self._address:
                        box.put(f"sure/{self._answered}", asked)
                        self._asked |= {str(asked.get("token"))} - {self._own}
                        self._patience_ends = now + SIGN_IN_S
            finally:
                box.seal = mine
            self._answered += 1


def _question(token: str, launch: Launch) -> dict[str, Any]:
    return {"token": token, "address": f"{launch.master_addr}:{launch.master_port}"}
