"""Store of a rank that has an agent: the store of the run, with the agent in front of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from nccl_doctor.gather.agent.connection import AgentConnection, AgentLost
from nccl_doctor.gather.envelope import LARGEST
from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout

SILENT_S = 3.0
"""Time without a beat of the agent after which it is dead or stopped."""
SEAT_S = 15.0
"""Time for the agent to have a seat: it waits for the other ranks of the host, and signs in."""
GOODBYE_S = 1.0
_TOLD = ("roster", "order/", "group/")
"""Messages of rank 0, by the begin of their keys, that the agent reads for all."""
_ANSWER, _BYE = "evidence/", "bye/"
_TICK_S = 0.1


class AgentStore(ControlStore):
    """The store as a rank sees it that has an agent: messages of rank 0 come from the agent, and
    answers go to it. All else goes to the store; so does everything once the agent is lost.
    """

    def __init__(self, box: ControlStore, connection: AgentConnection) -> None:
        vars(self).update(vars(box))  # the same connection
        self._connection: AgentConnection | None = connection
        self._told: dict[str, Any] = {}
        self._missing: set[str] = set()
        self._unposted: dict[str, Any] = {}
        """Answers that are not yet in the store, as far as the agent has said."""

    def sign_in(self, run_id: str, who: Any, ranks_here: int) -> int:
        """Sign in by way of the agent. Returns: the seat.

        Args:
            run_id: the run that is open.
            who: the sign-in, as JSON.
            ranks_here: number of ranks on this host.

        Raises:
            AgentLost: this rank has to sign in by itself.
        """
        connection = self._connection
        assert connection is not None
        connection.send(
            {"sign_in": who, "run": run_id, "store": [self.host, self.port], "of": ranks_here}
        )
        self._wait_for(lambda: "seat" in self._told, time.monotonic() + SEAT_S, lambda: None)
        if not isinstance(seat := self._told.pop("seat", None), int):
            raise AgentLost("the agent has no seat")
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
        if self._connection is not None and key.startswith(_TOLD):
            try:
                return self._message(key, until, tick, leave)
            except AgentLost:
                self._go_on_alone()
        return super().get(key, max(0.0, until - time.monotonic()), tick, largest, leave)

    def put(self, key: str, value: Any, timeout_s: float = OPERATION_S) -> None:
        """See `ControlStore`."""
        if self._connection is None or not key.startswith((_ANSWER, _BYE)):
            super().put(key, value, timeout_s)
            return
        self._unposted[key] = value
        try:
            self._connection.send({"post": key, "value": value})
            if key.startswith(_BYE):  # the last word: nobody would say it again
                until = time.monotonic() + GOODBYE_S
                self._wait_for(lambda: not self._unposted, until, lambda: None)
                if self._unposted:
                    raise AgentLost("the agent does not say goodbye")
        except AgentLost:
            self._go_on_alone()

    def _message(
        self, key: str, until: float, tick: Callable[[], None], leave: Callable[[], bool] | None
    ) -> Any:
        """A message of rank 0, as the agent reads it.

        Raises:
            StoreTimeout: it did not come.
            AgentLost: the agent is.
        """
        if key not in self._told:
            assert self._connection is not None
            patience_s = max(0.0, until - time.monotonic())
            self._missing.discard(key)
            self._connection.send({"want": key, "patience_s": patience_s})
            # What is there, or is not, the agent says: it may have to ask the store first.
            until = max(until, time.monotonic() + OPERATION_S)
            self._wait_for(lambda: key in self._told or key in self._missing, until, tick, leave)
        if key not in self._told:
            raise StoreTimeout(f"no value for {key}")
        return self._told[key] if key.startswith("group/") else self._told.pop(key)

    def _wait_for(
        self,
        enough: Callable[[], bool],
        until: float,
        tick: Callable[[], None],
        leave: Callable[[], bool] | None = None,
    ) -> None:
        """Take what the agent says until it is enough, or the time is over, or `leave`.

        Raises:
            AgentLost: the agent is gone, or stopped.
        """
        connection = self._connection
        assert connection is not None
        received = time.monotonic()
        while True:
            for message in connection.received():
                received = time.monotonic()
                self._take(message)
            now = time.monotonic()
            if enough() or now >= until or (leave is not None and leave()):
                return
            if now - received > SILENT_S:
                raise AgentLost(f"the agent said nothing for {SILENT_S:g} s")
            tick()
            connection.wait(min(_TICK_S, until - now))

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise AgentLost("a message that is no object")
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
        """Leave the agent, and post what it may not have posted."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
        self._connection = None
        for key, value in self._unposted.items():
            super().put(key, value)
        self._unposted.clear()
