"""The order in which a host calls the others and waits for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from nccl_doctor.api import Context, Launch
from nccl_doctor.toolkit.peers.calls import hold_calls
from nccl_doctor.toolkit.peers.listeners import Listeners


class Others:
    """The others of a round: they listen, and say nothing more."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def post(self, tag: str, value: Any) -> None:
        self._events.append(f"posts {tag}")

    def collect(
        self, tag: str, timeout_s: float, of: Collection[int] | None = None
    ) -> dict[int, Any]:
        self._events.append(f"waits for {tag}")
        return {1: [{"address": "127.0.0.2"}]} if tag == "listen" else {}

    def store(self) -> Any:
        raise NotImplementedError


def test_what_was_found_is_said_before_the_others_are_waited_for() -> None:
    events: list[str] = []
    ctx = Context(Launch(), {}, group=(0, 1), seat=0, peers=Others(events))
    with Listeners(["127.0.0.1"]) as listeners:
        made = hold_calls(
            ctx, listeners, {"127.0.0.1": {}}, lambda *_: "made", so_far=events.append
        )
    assert made == "made"
    assert events == [
        *("posts listen", "waits for listen", "made"),
        *("posts done", "waits for done", "posts gone"),
    ]
