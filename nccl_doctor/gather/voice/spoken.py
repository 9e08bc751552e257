"""Connection of a rank that is spoken for: the store of the run, with a speaker in front of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from nccl_doctor.gather.envelope import LARGEST
from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.voice.line import LineLost, SpeakerLine

SILENT_S = 3.0
"""Time without a beat of the speaker after which it is dead or stopped."""
SEAT_S = 15.0
"""Time for the speaker to have a seat: it waits for the other ranks of the host, and signs in."""
GOODBYE_S = 1.0
_TOLD = ("roster", "order/", "group/")
"""Messages of rank 0, by the begin of their keys, that the speaker reads for all."""
_ANSWER, _BYE = "evidence/", "bye/"
_TICK_S = 0.1


class Spoken(ControlStore):
    """The store as a rank sees it that is spoken for: what rank 0 tells comes by the line, and the
    answers go by it. All else goes to the store; so does everything once the line is lost.
    """

    def __init__(self, box: ControlStore, line: SpeakerLine) -> None:
        vars(self).update(vars(box))  # the same connection
        self._line: SpeakerLine | None = line
        self._told: dict[str, Any] = {}
        self._missing: set[str] = set()
        self._unposted: dict[str, Any] = {}
        """Answers of which the speaker has not yet said that they are in the store."""

    def sign_in(self, run_id: str, who: Any, ranks_here: int) -> int:
        """Sign in by way of the speaker. Returns: the seat.

        Args:
            run_id: the run that is open.
            who: the sign-in, as JSON.
            ranks_here: number of ranks on this host.

        Raises:
            LineLost: this rank has to sign in by itself.
        """
        line = self._line
        assert line is not None
        line.send(
            {"sign_in": who, "run": run_id, "store": [self.host, self.port], "of": ranks_here}
        )
        self._listen(lambda: "seat" in self._told, time.monotonic() + SEAT_S, lambda: None)
        if not isinstance(seat := self._told.pop("seat", None), int):
            raise LineLost("the speaker has no seat")
        return seat

    def get(
        self,
        key: str,
        timeout_s: float,
        tick: Callable[[], None] = lambda: None,
        largest: int = LARGEST,
        leave: Callable[[], bool] | None = None,
    ) -> Any:
        """See `ControlStore`."""
        until = time.monotonic() + timeout_s
        if self._line is not None and key.startswith(_TOLD):
            try:
                return self._hear(key, until, tick, leave)
            except LineLost:
                self._go_on_alone()
        return super().get(key, max(0.0, until - time.monotonic()), tick, largest, leave)

    def put(self, key: str, value: Any, timeout_s: float = OPERATION_S) -> None:
        """See `ControlStore`."""
        if self._line is None or not key.startswith((_ANSWER, _BYE)):
            super().put(key, value, timeout_s)
            return
        self._unposted[key] = value
        try:
            self._line.send({"post": key, "value": value})
            if key.startswith(_BYE):  # the last word: nobody would say it again
                until = time.monotonic() + GOODBYE_S
                self._listen(lambda: not self._unposted, until, lambda: None)
                if self._unposted:
                    raise LineLost("the speaker does not say goodbye")
        except LineLost:
            self._go_on_alone()

    def _hear(
        self, key: str, until: float, tick: Callable[[], None], leave: Callable[[], bool] | None
    ) -> Any:
        """A message of rank 0, as the speaker reads it.

        Raises:
            StoreTimeout: it did not come.
            LineLost: the line is.
        """
        if key not in self._told:
            assert self._line is not None
            patience_s = max(0.0, until - time.monotonic())
            self._missing.discard(key)
            self._line.send({"want": key, "patience_s": patience_s})
            # What is there, or is not, the speaker says: it may have to ask the store first.
            until = max(until, time.monotonic() + OPERATION_S)
            self._listen(lambda: key in self._told or key in self._missing, until, tick, leave)
        if key not in self._told:
            raise StoreTimeout(f"no value for {key}")
        return self._told[key] if key.startswith("group/") else self._told.pop(key)

    def _listen(
        self,
        enough: Callable[[], bool],
        until: float,
        tick: Callable[[], None],
        leave: Callable[[], bool] | None = None,
    ) -> None:
        """Take what the speaker says until it is enough, or the time is over, or `leave`.

        Raises:
            LineLost: the speaker is gone, or stopped.
        """
        line = self._line
        assert line is not None
        heard = time.monotonic()
        while True:
            for message in line.heard():
                heard = time.monotonic()
                self._take(message)
            now = time.monotonic()
            if enough() or now >= until or (leave is not None and leave()):
                return
            if now - heard > SILENT_S:
                raise LineLost(f"the speaker said nothing for {SILENT_S:g} s")
            tick()
            line.wait(min(_TICK_S, until - now))

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise LineLost("a message that is no object")
        if isinstance(key := message.get("key"), str):
            if "value" in message:
                self._told[key] = message["value"]
            else:
                self._missing.add(key)
        elif "seat" in message:
            self._told["seat"] = message["seat"]
        elif isinstance(posted := message.get("posted"), str):
            self._unposted.pop(posted, None)

    def _go_on_alone(self) -> None:
        """Leave the speaker, and post what it may not have posted."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.close()
        self._line = None
        for key, value in self._unposted.items():
            super().put(key, value)
        self._unposted.clear()
