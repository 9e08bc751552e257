"""What strangers write into the store of a run: all of it is data that our own readers must refuse.

None of them has the key. `Names` says by which names they write: those that everybody knows, or
those of the run itself, which some releases of torch list to everybody who reaches the port.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor import __version__
from nccl_doctor.gather.envelope import OPEN, PROTOCOL, Seal, wrap
from nccl_doctor.gather.messages import SIGN_IN_MAX
from nccl_doctor.gather.opening import OPENING
from nccl_doctor.gather.store import PIECE_BYTES, ControlStore
from tests.ranks.strangers.job import SIGN_IN

MANY = 60
HEAD = f'nccl-doctor {{"protocol": {PROTOCOL}, "version": "{__version__}"}}\n'.encode()


@dataclass(frozen=True)
class Target:
    """The store as a rogue sees it: `meeting` and `run` name the keys that it writes to."""

    store: Any
    meeting: ControlStore
    run: ControlStore

    def put(self, name: str, message: bytes) -> None:
        pieces = [message[i : i + PIECE_BYTES] for i in range(0, len(message), PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], start=1):
            self.store.set(f"{name}#{number}", piece)
        self.store.set(name, len(pieces).to_bytes(4, "big") + pieces[0])

    def say(self, key: str, value: Any, seal: Seal = OPEN) -> None:
        name = self.run.name(key)
        self.put(name, wrap(name, value, seal))


def sign_in(rank: int = 1, **more: Any) -> dict[str, Any]:
    """A sign-in that claims a rank."""
    return {**SIGN_IN, "launch": {**SIGN_IN["launch"], "rank": rank}, **more}


def seats() -> Iterator[str]:
    """Keys of seats that no rank of the job has."""
    return (f"seat/{seat}" for seat in range(4, 4 + MANY))


def big_sign_ins(target: Target) -> None:
    filler = ["x" * 20] * ((SIGN_IN_MAX - 2000) // 24)
    value = sign_in(facts={"clock": {"alone": {"status": "ok", "facts": {"a": filler}}}})
    message = HEAD + packed(json.dumps(value).encode())
    for key in seats():
        target.put(target.run.name(key), message)
    target.store.add(target.run.name("seats"), MANY)


def packed(text: bytes) -> bytes:
    return zlib.compress(text, 6)


def bombs(target: Target) -> None:
    message = HEAD + packed(b'{"host": {"name": "nd9"}, "launch": {}, "a": "' + b"a" * 50_000_000)
    for key in seats():
        target.put(target.run.name(key), message)
    target.store.add(target.run.name("seats"), MANY)


def seemingly_sealed(target: Target) -> None:
    """What says that it is sealed has to be read before that is known not to be true."""
    head = HEAD.replace(b"}", b', "mac": "' + b"0" * 64 + b'"}')
    for number, key in enumerate(seats()):
        size = SIGN_IN_MAX // 2 if number % 6 == 0 else 200_000
        target.put(target.run.name(key), head + os.urandom(size))
    target.store.add(target.run.name("seats"), MANY)


def batches(target: Target) -> None:
    for key, value in zip(
        seats(),
        (
            {"sign_ins": 7},
            {"sign_ins": []},
            {"sign_ins": [sign_in()] * 33},
            {"sign_ins": [sign_in(facts=7), 7, None], "texts": [{}]},
            {"sign_ins": [sign_in(facts={"clock": {"alone": {"facts": 10**9}}})], "texts": 7},
            {"sign_ins": [sign_in(pid=-1)], "texts": ["["]},
            [],
            7,
        ),
        strict=False,
    ):
        target.say(key, value)
    target.store.add(target.run.name("seats"), MANY)


def openings(target: Target) -> None:
    name = target.meeting.name(OPENING)
    target.put(name, b"anything")


def other_openings(target: Target) -> None:
    name = target.meeting.name(OPENING)
    target.put(name, wrap(name, {"run": ["x"]}))


def sealed_openings(target: Target) -> None:
    name = target.meeting.name(OPENING)
    target.put(name, wrap(name, {"run": "another"}, Seal(b"guessed" * 4)))


def layouts(target: Target) -> None:
    for key in ("layout", "roster"):
        target.say(key, {"tokens": {"x": 1}, "places": 7, "next_s": -1})


def orders(target: Target) -> None:
    for number in range(20):
        target.say(f"order/{number}", {"groups": [["a"]], "deadline_s": "long"})


def finishes(target: Target) -> None:
    for number in range(20):
        target.say(f"order/{number}", {"finish": 0})


def counters(target: Target) -> None:
    for key in ("seats", "deaths", "departures"):
        target.store.add(target.run.name(key), 10**12)
    for key in ("coordinators", "doubts"):
        target.store.add(target.meeting.name(key), 1000)


def lowered_counters(target: Target) -> None:
    target.store.add(target.run.name("seats"), -1)


def refused(target: Target) -> None:
    for number, key in enumerate(seats()):
        target.say(key, sign_in(rank=number, facts=7))
    target.store.add(target.run.name("seats"), MANY)


def many_local_ranks(target: Target) -> None:
    launch = {**SIGN_IN["launch"], "local_world_size": 65_000, "local_rank": 64_000}
    target.say("seat/4", sign_in(launch=launch))
    target.store.add(target.run.name("seats"), MANY)


Rogue = Callable[[Target], None]
BEFORE: Mapping[str, Rogue] = {
    each.__name__: each for each in (openings, other_openings, sealed_openings)
}
"""What is written before rank 0 is there: it writes its own over that."""
AFTER: Mapping[str, Rogue] = {
    each.__name__: each
    for each in (
        big_sign_ins,
        bombs,
        seemingly_sealed,
        many_local_ranks,
        refused,
        batches,
        layouts,
        orders,
        counters,
        lowered_counters,
    )
}
"""What is written once the run is open."""
LARGE = (big_sign_ins, bombs, seemingly_sealed)
"""Those that take all the seats that a stranger can write to."""
