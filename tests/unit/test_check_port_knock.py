"""What check `port` observes, on real sockets on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from nccl_doctor.api import Cluster, Context, Finding, Launch, Skip, Untested, Where
from nccl_doctor.checks.port import Port
from nccl_doctor.checks.port.store_ping import ask_store
from nccl_doctor.model.job import Job, Rendezvous
from tests.support.clusters import make_cluster
from tests.support.findings import judge
from tests.support.forkserver import Forked

CHECK = Port()
AGENT = {"server": "agent", "bind_errno": None, "bind_error": ""}
SELF = {**AGENT, "server": "self"}
OTHER = {**AGENT, "server": "other"}


def judged(cluster: Cluster) -> list[Finding]:
    return judge(CHECK, cluster)


def context(port: int | None, master: str | None = "127.0.0.1", **more: Any) -> Context:
    launch = Launch("env", master_addr=master, master_port=port, rank=1, world_size=2)
    if more.pop("agent_store", False):
        launch = dataclasses.replace(launch, agent_store=True)
    return Context(launch=launch, env={}, **{"door": OTHER, "join_timeout_s": 3.0, **more})


def observed(ctx: Context) -> tuple[dict[str, Any], float]:
    """Facts as they come out of a report, and how long they took, always before the deadline."""
    started = time.monotonic()
    found = json.loads(json.dumps(CHECK.observe(ctx)))
    took = time.monotonic() - started
    assert took < CHECK.deadline(ctx)
    return found, took


def observed_apart(ctx: Context) -> tuple[dict[str, Any], float]:
    """In a child of its own, as the engine does it: a real client asks, and may never come back."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            writer.send(observed(ctx))
        os._exit(0)
    try:
        assert reader.poll(20)
        result: tuple[dict[str, Any], float] = reader.recv()
        return result
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def listener(host: str = "127.0.0.1", backlog: int = 8) -> Iterator[int]:
    """Accepts, in the kernel, and never says a word."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        sock.listen(backlog)
        yield sock.getsockname()[1]


def free_port() -> int:
    with listener() as port:
        return port


@contextlib.contextmanager
def child(script: str) -> Iterator[int]:
    """A Python process that prints the port that it serves; killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=10)


STORE = """
import time
from torch.distributed import TCPStore
time.sleep({after_s})
store = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False, use_libuv={libuv})
print(store.port, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def store(port: int = 0, *, libuv: bool = True, after_s: int = 0) -> Iterator[IO[str]]:
    """What a process that serves a store prints: its port, once it is there; killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "out")
        os.mkfifo(pipe)
        code = STORE.format(port=port, libuv=libuv, after_s=after_s)
        null = Path(os.devnull)
        process = Forked([], dict(os.environ), folder=null.parent, out=pipe, err=null, code=code)
        try:
            with pipe.open() as out:
                yield out
        finally:
            process.kill()
            process.wait(10)


HTTP = """
import http.server
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("late_s", [0.0, 0.4])
def test_a_store_is_recognised_by_an_answer_that_comes_late(late_s: float):
    """As where the road loses packets: what a store says is no other service's first line."""
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=_answers_ping, args=(there, late_s))
        thread.start()
        answer = ask_store(here, 0.3)
        thread.join()
    assert answer.kind == "store"


def _answers_ping(sock: socket.socket, late_s: float) -> None:
    """As a TCPStore does: what follows the validation and the query comes back."""
    asked = sock.recv(64)
    time.sleep(late_s)  # the time that an answer takes is what is tested
    sock.sendall(asked[6:10])


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("agent", [True, False])
def test_a_store_is_recognised_at_once(libuv: bool, agent: bool):
    with store(libuv=libuv) as out:
        port = int(out.readline())
        found, took = observed(context(port, agent_store=agent, door=AGENT if agent else OTHER))
    assert found["knock"]["last"]["answer"] == "store"
    assert found["knock"]["knocks"] == 1
    assert took < 2.0


def test_a_store_that_comes_late_is_waited_for():
    port = free_port()
    with store(port, after_s=1):
        found, _ = observed(context(port, join_timeout_s=30.0))
    assert found["knock"]["first"]["outcome"] == "refused"
    assert found["knock"]["last"]["answer"] == "store"
    assert (
        judged(make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)) == []
    )


def test_a_closed_port_is_refused_until_just_before_the_deadline():
    port = free_port()
    c10d = Rendezvous("c10d", "head:29400", "read_timeout=200", "--rdzv-conf")
    found, took = observed(context(port, job=Job(rendezvous=c10d)))
    last = found["knock"]["last"]
    assert found["store_timeout_s"] == 200.0, "of the job's command, not only of PET_RDZV_CONF"
    assert (last["outcome"], last["answer"]) == ("refused", "")
    assert found["knock"]["knocks"] > 2
    assert 1.0 < took < 3.0
    (finding,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)
    )
    assert (finding.code, finding.where) == (
        "port-refused",
        Where(links=(("nd1", "127.0.0.1"),)),
    )


def test_an_http_server_is_not_a_store():
    with child(HTTP) as port:
        found, took = observed_apart(context(port, join_timeout_s=60.0))
    last = found["knock"]["last"]
    assert last["answer"] == "other"
    assert "HTTP" in last["reply"] or "400" in last["reply"] or "DOCTYPE" in last["reply"]
    assert took < 6.5


def test_something_that_hangs_up_is_not_a_store():
    script = (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True)\n"
        "while True: s.accept()[0].close()"
    )
    with child(script) as port:
        found, took = observed_apart(context(port, join_timeout_s=60.0))
    assert found["knock"]["last"]["answer"] == "closed"
    assert took < 6.0


def test_something_that_only_accepts_is_not_a_store():
    with listener() as port:
        found, took = observed_apart(context(port, join_timeout_s=60.0))
    assert found["knock"]["last"]["answer"] == "silent"
    assert found["knock"]["knocks"] == 2
    assert took < 6.5
    (finding,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)
    )
    assert finding.code == "port-not-the-store"


def test_a_full_backlog_is_no_answer():
    with listener(backlog=0) as port, contextlib.ExitStack() as held:
        for _ in range(3):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        found, took = observed(context(port))
    assert found["knock"]["last"]["outcome"] == "dropped"
    assert took < 3.0


def test_the_holder_of_a_port_is_named_and_nobody_knocks():
    with child(HTTP) as port:
        door = {"server": "self", "bind_errno": errno.EADDRINUSE, "bind_error": "Address in use"}
        found, took = observed(context(port, door=door))
    assert found["holder"]["pid"]
    assert found["holder"]["state"] == "listening"
    assert "python" in found["holder"]["command"]
    assert "\n" not in found["holder"]["command"]
    assert len(found["holder"]["command"]) <= 120
    assert "knock" not in found
    assert took < 2.0


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_ipv6_is_tried_before_ipv4(host: str):
    try:
        with listener("::1"):
            pass
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with store() as out:  # it listens on both families
        found, _ = observed(context(int(out.readline()), host))
    assert found["knock"]["last"]["answer"] == "store"


def test_what_cannot_be_tested_is_said():
    for ctx in (context(None), context(29500, None)):
        with pytest.raises(Untested, match="not set"):
            CHECK.observe(ctx)
    with pytest.raises(Untested, match="does not resolve"):
        CHECK.observe(context(29500, "bad..label"))


def test_outside_a_job_there_is_no_port_to_test():
    with pytest.raises(Skip, match="no launcher started this process"):
        CHECK.observe(Context(launch=Launch(), env={}))


def test_the_deadline_is_long_only_where_rank_0_may_come_late():
    assert CHECK.deadline(context(1, join_timeout_s=60.0)) == 60.0
    assert CHECK.deadline(context(1, join_timeout_s=60.0, door=SELF)) < 10.0
    assert CHECK.deadline(context(1, join_timeout_s=60.0, door=AGENT, agent_store=True)) < 10.0


def test_the_risk_of_a_port_is_read_from_the_kernel():
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low = int(file.read().split()[0])
    door = {"server": "self", "bind_errno": errno.EACCES, "bind_error": "Permission denied"}
    inside, _ = observed(context(low + 1, door=door))
    below, _ = observed(context(min(low - 1, 29500), door=door))
    assert inside["ephemeral"][0] == low
    assert below["ephemeral"] is None
    assert below["may_bind"]
