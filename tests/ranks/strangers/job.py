"""A job of two ranks whose store the test serves, so that anything can lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.gather import server
from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.store import PIECE_BYTES, ControlStore
from tests.ranks.ranks import Ranks

JOIN_S = 25.0
"""Longer than any of these runs may take: nobody waits for whom it has refused."""
TIMEOUT_S = 60.0
OPTIONS = (f"--join-timeout={JOIN_S:g}", f"--timeout={TIMEOUT_S:g}", "--select=ranks,launch_record")
WAIT_S = 50
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
SIGN_IN: dict[str, Any] = {
    "token": "t",
    "pid": 7,
    "launch": {"launcher": "env", "rank": 1, "world_size": 2},
    "host": {"name": "nd9", "key": "k", "addresses": []},
    "env": {},
    "device": "cpu",
}


class Job:
    """Two ranks, not yet started, whose store the test serves; some with a key of that name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ranks = self.of()
        self._door = server.serve(self.ranks.port)
        assert self._door.error is None

    def of(self, *keys: str, options: Sequence[str] = OPTIONS) -> Ranks:
        """The ranks; at the same store where there are some already."""
        extra = {rank: [self._key(name)] for rank, name in enumerate(keys) if name}
        made = Ranks(self._folder, 2, options, start=[], changes={0: AGENT, 1: AGENT}, extra=extra)
        if hasattr(self, "ranks"):
            made.port = self.ranks.port
        self.ranks = made
        return made

    def _key(self, name: str) -> str:
        path = self._folder / name
        path.write_text(name * 8)
        path.chmod(0o600)
        return f"--key={path}"

    def end(self) -> None:
        self.ranks.kill()
        self._door.close()


def store_of(ranks: Ranks) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", ranks.port, is_master=False)


def put(ranks: Ranks, key: str, message: bytes) -> None:
    """Put a message into the store, in pieces, whatever it is."""
    store = store_of(ranks)
    pieces = [message[i : i + PIECE_BYTES] for i in range(0, len(message), PIECE_BYTES)]
    for number, piece in enumerate(pieces[1:], start=1):
        store.set(f"{key}#{number}", piece)
    store.set(key, len(pieces).to_bytes(4, "big") + pieces[0])


def meeting_of(ranks: Ranks, seal: Seal = OPEN) -> ControlStore:
    return ControlStore("127.0.0.1", ranks.port, timeout_s=5, prefix=MEETING, seal=seal)


def run_of(ranks: Ranks, seal: Seal = OPEN) -> ControlStore:
    """The store, for messages of the run that rank 0 opens."""
    meeting = meeting_of(ranks, seal)
    run_id = opened(meeting, WAIT_S)
    return meeting.beside(prefix_of(run_id), Seal(seal.secret, run_id if seal.secret else ""))
