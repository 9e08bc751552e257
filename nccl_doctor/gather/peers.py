"""Messages between the participants of one round, over the store of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nccl_doctor.gather.envelope import OPEN, BadMessage, Seal
from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.toolkit.net.no_time_wait import calls_without_time_wait

_LEFT = "left"
_LOOK_S = 1.0
"""Time after which it is asked who has left, and between two such questions."""


def say_left(box: ControlStore, prefix: str, seat: int) -> None:
    """Say that a participant has ended its part of the round of this prefix, and will post no more.

    `box`: of the run; `prefix`: below its own.
    """
    box.put(f"{prefix}{_LEFT}/{seat}", True)
    box.add(f"{prefix}{_LEFT}", 1)


class RoundPeers:
    """The `Peers` of one round: connects on first use, in the probe child itself."""

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        group: tuple[int, ...],
        seat: int,
        *,
        seal: Seal = OPEN,
        forms_groups: bool = True,
    ) -> None:
        """`forms_groups`: a process group may be formed over the `store`."""
        self._address = (host, port)
        self._forms_groups = forms_groups
        self._seal = seal
        self._prefix, self._group, self._seat = prefix, group, seat
        self._opened: ControlStore | None = None

    @property
    def _box(self) -> ControlStore:
        if self._opened is None:
            host, port = self._address
            # A process group may say things in the store that nobody acknowledges.
            keeps = self._forms_groups
            with contextlib.nullcontext() if keeps else calls_without_time_wait(port):
                self._opened = ControlStore(
                    host, port, timeout_s=OPERATION_S, prefix=self._prefix, seal=self._seal
                )
        return self._opened

    def post(self, tag: str, value: Any) -> None:
        """See `api.Peers`."""
        self._box.put(f"{tag}/{self._seat}", value)

    def collect(
        self, tag: str, timeout_s: float, of: Collection[int] | None = None
    ) -> dict[int, Any]:
        """See `api.Peers`."""
        keys = {f"{tag}/{seat}": seat for seat in (self._group if of is None else of)}
        there = self._box.wait(keys, timeout_s, leave=self._nobody_comes(keys))
        told = {}
        for key, seat in keys.items():
            if key in there:
                with contextlib.suppress(BadMessage, StoreTimeout):  # as if it had said nothing
                    told[seat] = self._box.get(key, 0.0)
        return told

    def _nobody_comes(self, keys: Mapping[str, int]) -> Callable[[], bool]:
        """Asks, now and then, whether all that have not posted their key have left."""
        next_s = time.monotonic() + _LOOK_S

        def ask() -> bool:
            nonlocal next_s
            if time.monotonic() < next_s:
                return False
            next_s = time.monotonic() + _LOOK_S
            if not self._box.add(_LEFT, 0):
                return False
            away = keys.keys() - self._box.wait(keys, 0.0)
            left = {f"{_LEFT}/{keys[key]}" for key in away}
            return self._box.wait(left, 0.0) == left

        return ask

    def store(self) -> Any:
        """See `api.Peers`."""
        return self._box.raw("process-group")
