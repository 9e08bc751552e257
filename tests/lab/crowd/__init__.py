"""A crowd: thousands of participants on one machine, and the real rank 0 that examines them.

`record` holds what a healthy run in the lab saw, as a cluster of any size would have seen it;
`answers` what a participant says in a round, with the fault that it is told; `head` runs rank 0,
with the checks of the program but for what they observe; `players` plays all others, with the
program's own client: each is a thread with a connection of its own to the store.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import until

CASES = ("healthy", "silent", "frozen", "cut", "variable")
"""What is wrong: nothing; a host that never comes; one that stops in the middle; a link that is
cut; 1 % of the hosts have another value of a variable.
"""
FREEZES_IN = ("collectives", "world")
"""Check and round in which the frozen host stops."""
VARIABLE, VALUE = "TORCH_GLOO_LAZY_INIT", "1"
"""The variable that some hosts have, and its value."""
PORT = 29500
GUN = "go"
"""File in the folder of a run: once it is there, all start."""
SEATS = "seats"
"""File with the rank of each seat, one more than that, as 32 bits each."""
_JOIN_S, _JOINS_A_SECOND = 10.0, 200
"""Least time limit of the sign-in where somebody does not come; and the ranks that sign in within
a second even where a few processors play them all.
"""


@dataclass(frozen=True)
class Plan:
    """One run: the size, what is wrong, and where."""

    hosts: int
    per_host: int
    case: str
    folder: str
    silent: tuple[int, ...] = ()
    """Hosts (by number) that never sign in."""
    frozen: tuple[int, ...] = ()
    cut: int | None = None
    """Host whose link to its first partner is cut."""
    odd: tuple[int, ...] = ()
    """Hosts with the odd variable."""

    @property
    def ranks(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.per_host

    @property
    def join_s(self) -> float:
        """Time limit of the sign-in where somebody does not come."""
        return max(_JOIN_S, self.ranks / _JOINS_A_SECOND)

    @classmethod
    def of(cls, ranks: int, per_host: int, case: str, folder: Path) -> Plan:
        """The plan of a case: the same places for the same size."""
        hosts = ranks // per_host
        middle = hosts // 2
        some = tuple(range(middle, middle + max(1, hosts // 100)))
        return cls(
            hosts,
            per_host,
            case,
            str(folder),
            silent=(middle,) if case == "silent" else (),
            frozen=(middle,) if case == "frozen" else (),
            cut=middle if case == "cut" else None,
            odd=some if case == "variable" else (),
        )

    def write(self) -> Path:
        """File with this plan, in its folder, where nobody has a seat yet."""
        (Path(self.folder) / SEATS).write_bytes(bytes(4 * 2 * self.ranks))
        path = Path(self.folder) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> Plan:
        """Inverse of `write`."""
        return cls.from_json(json.loads(Path(path).read_text()))

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Inverse of `asdict`."""
        lists = {name: tuple(data[name]) for name in ("silent", "frozen", "odd")}
        return cls(**{**data, **lists})

    def wait_for_the_gun(self) -> None:
        """Wait until all are to start."""
        until((Path(self.folder) / GUN).exists, math.inf, every_s=0.002)


def name_of(host: int) -> str:
    """Name of a host, as the lab calls its hosts."""
    return f"nd{host}"


def way_to_rank_0(host: int) -> str:
    """Loopback address by which a host calls rank 0. To one address, thousands of calls from one
    machine would spend their time on the search for a free port; hosts of a cluster do not.
    """
    return f"127.{1 + (host >> 16)}.{host >> 8 & 255}.{host & 255}"


def address_of(host: int) -> str:
    """Address of a host; those of the lab for the first two."""
    return f"192.168.{77 + (host + 1) // 250}.{(host + 1) % 250 or 250}" if host else "192.168.77.1"
