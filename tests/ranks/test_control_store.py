"""Letters over a real store, also when its host is frozen, dead or something else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.gather import envelope, server, store
from nccl_doctor.gather.envelope import BadMessage, NotAuthentic, OtherVersion, Seal
from nccl_doctor.gather.peers import RoundPeers, say_left
from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreLost, StoreTimeout
from nccl_doctor.launch.identity import host_addresses
from nccl_doctor.system import forks
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("torch")

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "test/"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(port, process id) of a store."""
    import torch.distributed  # noqa: F401  # on a busy host it takes longer than a store is waited for

    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    port = free_port()
    served = server.serve(port)
    assert served.error is None
    (pid,) = forks.living
    yield port, pid
    served.close()
    assert not forks.living


def thread_states(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/status"))


def connect(port: int) -> ControlStore:
    return ControlStore("127.0.0.1", port, timeout_s=5, prefix=PREFIX)


def test_batches_of_any_size_arrive_whole(door: tuple[int, int]) -> None:
    ours, theirs = connect(door[0]), connect(door[0])
    for value in (True, {"a": [1.5, "ü", None]}, [os.urandom(64).hex() for _ in range(4000)]):
        ours.put("batch", value)
        assert theirs.get("batch", 1.0) == value


def test_no_piece_is_larger_than_a_small_packet(door: tuple[int, int]) -> None:
    box = connect(door[0])
    box.put("big", [os.urandom(64).hex() for _ in range(500)])
    from torch.distributed import TCPStore

    raw = TCPStore("127.0.0.1", door[0], is_master=False)
    piece = 1
    while raw.check([f"{PREFIX}big#{piece}"]):
        assert len(raw.get(f"{PREFIX}big#{piece}")) <= store.PIECE_BYTES
        piece += 1
    assert piece > 10


class SmallPackets:
    """A path to a store that swallows answers longer than a small packet, and all that follow."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        self.swallowed = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the door is closed
            while True:
                caller, _ = self._door.accept()
                store = socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(target=self._carry, args=(caller, store, 1 << 20)).start()
                threading.Thread(target=self._carry, args=(store, caller, 1200)).start()

    def _carry(self, sender: socket.socket, receiver: socket.socket, most: int) -> None:
        swallows = False
        with contextlib.suppress(OSError), receiver:
            while data := sender.recv(1 << 20):
                swallows = swallows or len(data) > most
                self.swallowed += swallows
                if not swallows:
                    receiver.sendall(data)

    def close(self) -> None:
        self._door.close()


def test_a_path_that_swallows_large_packets_does_not_swallow_a_long_letter(
    door: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MANY_S", 1.0)
    batch = [os.urandom(64).hex() for _ in range(300)]
    connect(door[0]).put("batch", batch)
    path = SmallPackets(door[0])
    theirs = connect(path.port)
    for _ in range(2):
        assert theirs.get("batch", 1.0) == batch
        assert path.swallowed == 1, "it is tried once"
    path.close()


def test_a_long_batch_whose_piece_is_missing(door: tuple[int, int]) -> None:
    ours, theirs = connect(door[0]), connect(door[0])
    ours.put("batch", [os.urandom(64).hex() for _ in range(500)])
    ours.forget(["batch#20"])
    with pytest.raises(BadMessage, match="a piece of it is missing"):
        theirs.get("batch", 1.0)


def test_a_batch_that_does_not_come_is_a_timeout_not_a_loss(door: tuple[int, int]) -> None:
    box = connect(door[0])
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match="no value for none"):
        box.get("none", 0.3)
    assert 0.3 <= time.monotonic() - started < 1.5
    box.put("still", 1)
    assert box.get("still", 1.0) == 1


def test_wait_names_those_who_came(door: tuple[int, int]) -> None:
    box = connect(door[0])
    box.put("a", 1)
    box.put("c", 1)
    assert box.wait(["a", "b", "c"], 0.2) == {"a", "c"}


def test_batches_come_some_at_once_and_bad_ones_as_what_they_are(door: tuple[int, int]) -> None:
    box = connect(door[0])
    names = [f"evidence/{seat}" for seat in range(50)]
    for number, name in enumerate(names):
        box.put(name, number)
    long = [os.urandom(64).hex() for _ in range(100)]
    box.put("evidence/7", long)
    box.put("evidence/8", long)
    box.forget(["evidence/8#1"])
    box._store.set(f"{PREFIX}evidence/9", b"\0\0\0\1nothing of ours")
    box._store.set(f"{PREFIX}evidence/10", b"\xff\xff\xff\xffso long that nobody wants it")
    box._store = counted = Counted(box._store)
    found = box.many(names)
    assert found.keys() == set(names) - {"evidence/8", "evidence/10"}
    with pytest.raises(BadMessage):
        box.opened("evidence/9", found.pop("evidence/9"))
    assert box.opened("evidence/7", found.pop("evidence/7")) == long
    assert all(box.opened(key, found[key]) == int(key.split("/")[1]) for key in found)
    assert len(counted.asked) == 6, "pieces are asked for together, too"
    assert box.many([*names, "none"]).keys() < set(names), "who is missing keeps its neighbours"
    for broken in ("evidence/8", "evidence/10"):
        with pytest.raises(BadMessage):
            box.get(broken, 1.0)
    assert box.get("evidence/3", 1.0) == 3


class Counted:
    """Store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.asked: list[int] = []
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, names: list[str]) -> bool:
        self.asked.append(len(names))
        return bool(self._store.check(names))


def test_a_wait_that_may_be_left_is_left_soon(door: tuple[int, int]) -> None:
    box = connect(door[0])
    began = time.monotonic()
    assert box.wait(["none"], 30.0, leave=lambda: time.monotonic() > began + 0.3) == set()
    assert time.monotonic() - began < 5.0


def test_nobody_waits_for_one_that_has_left_its_round(door: tuple[int, int]) -> None:
    run = connect(door[0])
    group = (0, 1, 2)
    ours, theirs, others = (
        RoundPeers("127.0.0.1", door[0], f"{PREFIX}firewall/all/0/", group, seat) for seat in group
    )
    ours.post("done", 0)
    theirs.post("listen", 1)
    say_left(run, "firewall/all/0/", 1)  # its child has died
    began = time.monotonic()
    assert ours.collect("listen", 2.5, (1,)) == {1: 1}
    assert ours.collect("done", 2.5) == {0: 0}  # another one may still come
    assert time.monotonic() - began >= 2.5
    others.post("done", 2)
    assert ours.collect("done", 60.0) == {0: 0, 2: 2}
    assert time.monotonic() - began < 30.0


def test_many_batches_are_not_asked_for_one_by_one(door: tuple[int, int]) -> None:
    box = connect(door[0])
    names = [f"evidence/{seat}" for seat in range(400)]
    for name in names[:-1]:
        box._store.set(PREFIX + name, b"")
    box._store = counted = Counted(box._store)
    assert box.wait(names, 0.3) == set(names[:-1])
    assert len(counted.asked) < 100
    assert max(counted.asked) <= 16


def test_counters_are_shared(door: tuple[int, int]) -> None:
    ours, theirs = connect(door[0]), connect(door[0])
    assert [ours.add("n", 1), theirs.add("n", 1), ours.add("n", 0)] == [1, 2, 2]


def test_batch_above_the_bound_is_refused(
    door: tuple[int, int],
) -> None:
    box = connect(door[0])
    with pytest.raises(ValueError, match=str(envelope.LARGEST)):
        box.put("huge", os.urandom(envelope.LARGEST).hex())


def forged(port: int) -> Any:
    """The store, for somebody who keeps to no rule."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"\xff\xff\xff\xff", "4294967295 pieces: more than"),
        (b"\0\0\0\x09nccl", "a piece of it is missing"),
        (b"\0\0\0\x01" + b"x" * 2_000_000, "a piece of it is longer than 900 bytes"),
        (b"", "no message"),
        (b"\0\0\0\x01hello", "no message"),
        (b"\0\0\0\x01nccl-doctor {}\n", "no message"),
    ],
)
def test_a_forged_message_costs_neither_time_nor_the_connection(
    door: tuple[int, int], first: bytes, words: str
) -> None:
    box = connect(door[0])
    forged(door[0]).set(f"{PREFIX}order", first)
    started = time.monotonic()
    with pytest.raises(BadMessage, match=words):
        box.get("order", 5.0)
    assert time.monotonic() - started < 5.0
    box.put("still", 1)
    assert box.get("still", 1.0) == 1


def test_a_message_of_an_older_version_is_told_as_such(door: tuple[int, int]) -> None:
    elder = b"\0\0\0\x01" + zlib.compress(json.dumps({"token": "a"}).encode(), 6)
    forged(door[0]).set(f"{PREFIX}seat/0", elder)
    with pytest.raises(OtherVersion, match="an older version of nccl-doctor"):
        connect(door[0]).get("seat/0", 1.0)


def test_only_who_has_the_key_is_believed(door: tuple[int, int]) -> None:
    def box(secret: bytes | None, run: str = "1") -> ControlStore:
        seal = Seal(secret, run)
        return ControlStore("127.0.0.1", door[0], timeout_s=5, prefix=PREFIX, seal=seal)

    ours = box(b"a" * 32)
    for name, other in (
        ("stranger", box(None)),
        ("other-key", box(b"b" * 32)),
        ("earlier-run", box(b"a" * 32, "0")),
    ):
        other.put(name, {"finish": 0})
        with pytest.raises(StoreTimeout):  # by names that we do not look at
            ours.get(name, 0.1)
        forged(door[0]).set(ours.name(name), other._pieces(name, {"finish": 0})[-1][1])
        with pytest.raises(NotAuthentic):
            ours.get(name, 0.1)
        other.public().put(name, {"finish": 0})
        with pytest.raises(NotAuthentic) as caught:
            ours.public().get(name, 0.1)
        assert caught.value.value == {"finish": 0}, "what it says, to name who says it"
    ours.put("order/1", {"finish": 1})
    ours.public().put("order/1", {"finish": 1})
    with pytest.raises(NotAuthentic, match="with a key"):
        box(None).get("order/1", 1.0)
    store = forged(door[0])
    store.set(ours.name("order/2"), store.get(ours.name("order/1")))  # moved to another place
    with pytest.raises(NotAuthentic):
        ours.get("order/2", 0.1)
    assert box(b"a" * 32).get("order/1", 1.0) == {"finish": 1}


def test_what_is_put_in_the_place_of_a_sealed_message_is_replaced(door: tuple[int, int]) -> None:
    """Some releases of torch list the names of a store to everybody."""
    seal = Seal(b"a" * 32, "1")
    ours, theirs = (
        ControlStore("127.0.0.1", door[0], timeout_s=5, prefix=PREFIX, seal=seal) for _ in range(2)
    )
    value = [os.urandom(64).hex() for _ in range(20)]
    ours.put("batch", value)
    ours.put("bye", True)
    stranger = forged(door[0])
    for name in ("batch", "batch#1"):
        key, _, number = name.partition("#")
        stranger.set(ours.name(key) + (f"#{number}" if number else ""), b"\0\0\0\x01hello")
    theirs.forget(["bye"])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ours.wait, ["nothing"], 3.0)
        assert theirs.get("batch", 5.0) == value
    assert not theirs.wait(["bye"], 0.0), "what is gone stays so"


def test_frozen_store_costs_the_deadline_and_no_more(door: tuple[int, int]) -> None:
    port, pid = door
    box = connect(port)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all("T (stopped)" in status.read_text() for status in thread_states(pid)))
    try:
        started = time.monotonic()
        with pytest.raises(StoreLost, match="no answer from the store"):
            box.put("a", 1, timeout_s=0.5)
        assert time.monotonic() - started < 2.0
        started = time.monotonic()
        with pytest.raises(StoreLost):
            box.get("a", 60.0)
        assert time.monotonic() - started < 0.5  # lost stays lost, at once
    finally:
        os.kill(pid, signal.SIGCONT)


def test_dead_store_is_noticed_at_once(door: tuple[int, int]) -> None:
    port, pid = door
    box = connect(port)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(StoreLost):
        box.get("a", 30.0)
    assert time.monotonic() - started < 5.0


def test_nobody_there_is_a_loss_within_the_time_given() -> None:
    started = time.monotonic()
    with pytest.raises(StoreLost):
        ControlStore("127.0.0.1", free_port(), timeout_s=1.0, prefix=PREFIX)
    assert time.monotonic() - started < 4.0


def test_something_else_on_the_port_is_a_loss_within_the_time_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def accept_only() -> None:
            server.settimeout(0.1)
            held = []
            while not stop.is_set():
                try:
                    held.append(server.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept_only)
        thread.start()
        port = server.getsockname()[1]
        started = time.monotonic()
        try:
            with pytest.raises(StoreLost):  # torch 2.4 notices by its first question only
                ControlStore("127.0.0.1", port, timeout_s=1.0, prefix=PREFIX).get("key", 1.0)
            assert time.monotonic() - started < 4.0 + OPERATION_S
        finally:
            stop.set()
            thread.join()


def test_port_in_use_is_an_errno_not_a_text(door: tuple[int, int]) -> None:
    second = server.serve(door[0])
    assert second.facts["server"] == "self"
    assert second.error is not None
    assert second.error.errno == 98


# -- one host --------------------------------------------------------------------------------------


def test_the_store_of_one_host_listens_on_loopback_only() -> None:
    port = free_port()
    served = server.serve(port, only_for="localhost")
    try:
        assert (served.error, served.address) == (None, "127.0.0.1")
        connect(port).put("a", 1)
        for elsewhere in ("127.0.0.2", *host_addresses()):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((elsewhere, port), timeout=2).close()
    finally:
        served.close()


def test_it_listens_where_master_addr_leads_if_that_is_this_host() -> None:
    port = free_port()
    for name, address in (("127.0.0.3", "127.0.0.3"), ("192.0.2.77", "127.0.0.1")):
        served = server.serve(port, only_for=name)
        try:
            assert (served.error, served.address) == (None, address)
            ControlStore(address, port, timeout_s=5, prefix=PREFIX).put("a", 1)
        finally:
            served.close()


def test_a_port_that_the_job_could_not_have_is_taken_for_one_host_too() -> None:
    """The job binds every address: somebody at another one is in its way."""
    with socket.socket() as held:
        held.bind(("127.0.0.4", 0))
        held.listen()
        served = server.serve(held.getsockname()[1], only_for="localhost")
        served.close()
    assert served.error is not None
    assert served.error.errno == errno.EADDRINUSE


@pytest.mark.parametrize("crowd", [4, 16_384])
def test_who_waits_hears_at_once_and_asks_hardly_ever(door: tuple[int, int], crowd: int) -> None:
    ours, theirs = connect(door[0]), connect(door[0])
    theirs.crowd = crowd
    ticks: list[float] = []
    posts = threading.Timer(0.5, lambda: ours.put("batch", "here"))
    posts.start()
    began = time.monotonic()
    assert theirs.get("batch", 20.0, lambda: ticks.append(time.monotonic())) == "here"
    assert 0.4 < time.monotonic() - began < 3.0
    assert len(ticks) >= 2, "a waiting participant shows that it lives"
    posts.join()


_PATIENT = """
import sys
import torch.distributed  # before the store is waited for
from tests.ranks.test_control_store import StoreTimeout, connect

box = connect(int(sys.argv[1]))
box.crowd = int(sys.argv[2])
try:
    box.get("nothing", 0.3)
    sys.exit("it came")
except StoreTimeout:
    pass
assert box.wait(["nothing"], 0.0) == set()
box.put("batch", 1)
assert box.wait(["batch", "nothing"], 0.2) == {"batch"}
assert box.get("batch", 1.0) == 1
asked = []
box.wait(["nothing"], 20.0, leave=lambda: asked.append(True) or True)
assert asked == [True]
"""


@pytest.mark.parametrize("crowd", [4, 1024])
def test_nobody_waits_longer_than_it_may(door: tuple[int, int], crowd: int) -> None:
    # torch reads its log level once in a process, so this one is new.
    command = [sys.executable, "-c", _PATIENT, str(door[0]), str(crowd)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_few_are_asked_several_times_a_second_whether_to_wait_on(door: tuple[int, int]) -> None:
    asked: list[float] = []
    began = time.monotonic()
    connect(door[0]).wait(
        ["nothing"], 20.0, leave=lambda: asked.append(time.monotonic()) or len(asked) == 4
    )
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("crowd", [4, 1024])
def test_who_waits_notices_that_the_store_is_gone(door: tuple[int, int], crowd: int) -> None:
    box = connect(door[0])
    box.crowd = crowd
    threading.Timer(0.3, lambda: os.kill(door[1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(StoreLost):
        box.get("nothing", 20.0)
    assert time.monotonic() - began < 5.0


def test_where_torch_would_warn_of_waits_a_crowd_asks_less_often(
    door: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    box = connect(door[0])
    box.crowd = 16_384
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    box.wait(["nothing"], 20.0, leave=lambda: len(pauses) > 40)
    assert 2.0 < max(pauses) < 5.0
