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
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Context,
    Finding,
    Launch,
    Severity,
    Skip,
    Untested,
    Where,
)
from nccl_doctor.checks.port import Port
from nccl_doctor.model import Kind
from tests.clusters import make_cluster, shut_out

CHECK = Port()
AGENT = {"server": "agent", "bind_errno": None, "bind_error": ""}
SELF = {**AGENT, "server": "self"}
OTHER = {**AGENT, "server": "other"}


# -- judge: made-up clusters ---------------------------------------------------------------------


def tried(outcome: str, answer: str = "", **more: Any) -> dict[str, Any]:
    return {
        "address": "192.168.77.1",
        "outcome": outcome,
        "errno": None,
        "detail": "",
        "duration_s": 0.1,
        "answer": answer,
        "reply": "",
        **more,
    }


def facts(last: dict[str, Any] | None = None, server: str = "other", **more: Any) -> dict[str, Any]:
    last = tried("connected", "store") if last is None else last
    knock = {"first": tried("refused"), "last": last, "passed": [], "knocks": 3, "seconds": 2.0}
    return {
        "master_addr": "nd0",
        "port": 29500,
        "server": server,
        "bind_errno": None,
        "bind_error": "",
        "may_bind": True,
        "ephemeral": None,
        "knock": knock,
        **more,
    }


def judged(cluster: Cluster) -> list[Finding]:
    kinds: tuple[Kind, ...] = CHECK.kinds
    found = list(CHECK.judge(cluster))
    assert all(finding.kind in kinds for finding in found)
    json.dumps([finding.to_json() for finding in found])
    return found


def view_of_nd1(last: dict[str, Any], **more: Any) -> list[Finding]:
    """What host nd1 says by itself, having not come in."""
    return judged(
        make_cluster(("nd1",), check="port", by_host={"nd1": facts(last, **more)}, complete=False)
    )


def test_a_healthy_cluster_has_no_findings():
    hosts = {"nd0": facts(server="self"), "nd1": facts(), "nd2": facts()}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts, complete=False)) == []


@pytest.mark.parametrize("outcome", ["refused", "dropped", "rejected", "no-neighbour"])
def test_a_host_that_came_in_later_is_no_finding(outcome: str):
    hosts = {"nd0": facts(server="self"), "nd1": facts(tried(outcome))}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []


LINK = Where(links=(("nd1", "nd0"),))
HERE = Where(hosts=("nd1",))


@pytest.mark.parametrize(
    ("last", "code", "where", "words"),
    [
        (tried("refused", errno=errno.ECONNREFUSED), "port-refused", LINK, "refuses"),
        (tried("dropped", errno=errno.ETIMEDOUT), "port-blocked", LINK, "no answer"),
        (
            tried("rejected", errno=errno.EHOSTUNREACH, detail="No route to host"),
            "port-blocked",
            LINK,
            "No route to host",
        ),
        (
            tried("rejected", errno=errno.EPERM, detail="Operation not permitted"),
            "port-blocked",
            HERE,
            "a rule of this host",
        ),
        (
            tried("unreachable", errno=errno.ENETUNREACH, detail="Network is unreachable"),
            "no-route",
            HERE,
            "Network is unreachable",
        ),
        (tried("no-neighbour"), "no-route", HERE, "192.168.77.1"),
        (tried("error", detail="odd"), "port-blocked", LINK, "odd"),
        (
            tried("connected", "other", reply="HTTP/1.1 400 Bad Request"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "HTTP/1.1 400",
        ),
        (
            tried("connected", "silent"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "says nothing",
        ),
        (
            tried("connected", "closed"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "hangs up",
        ),
    ],
)
def test_the_last_knock_of_a_host_that_never_came_in(
    last: dict[str, Any], code: str, where: Where, words: str
):
    (found,) = view_of_nd1(last)
    assert (found.code, found.where, found.level) == (code, where, Severity.FAIL)
    assert words in found.message
    assert "29500" in found.message
    assert "PORT}" not in found.fix
    assert found.evidence["knocks"] == 3


def test_a_host_that_says_something_else_is_certain_and_one_that_says_nothing_is_not():
    (spoke,) = view_of_nd1(tried("connected", "other", reply="SSH-2.0"))
    (mute,) = view_of_nd1(tried("connected", "silent"))
    assert (spoke.confidence, mute.confidence) == (Confidence.CERTAIN, Confidence.LIKELY)


def test_an_address_that_drops_hides_one_that_answers():
    """Seen from a host that never came in: torch waits at the first address for ever."""
    knock = {
        "first": tried("connected", "store"),
        "last": tried("connected", "store"),
        "passed": [["2001:db8::1", "dropped"]],
        "knocks": 1,
        "seconds": 3.6,
    }
    (found,) = judged(
        make_cluster(("nd1",), check="port", by_host={"nd1": facts(knock=knock)}, complete=False)
    )
    assert (found.code, found.where) == ("port-blocked", LINK)
    assert "2001:db8::1" in found.message


RULE = {
    "tool": "nft",
    "table": "inet fw",
    "chain": "output",
    "rule": "tcp dport 29500 drop",
    "handle": "3",
    "verdict": "drop",
    "sure": True,
    "packet": "first",
    "incoming": False,
}


@pytest.mark.parametrize(
    ("outcome", "sure", "where"),
    [("dropped", True, HERE), ("dropped", False, LINK), ("refused", True, LINK)],
)
def test_a_rule_of_the_caller_is_the_callers_where_it_surely_fits(
    outcome: str, sure: bool, where: Where
):
    """On the host that calls, and nobody else is blamed for what it does not let out."""
    rules = {"hits": [{**RULE, "sure": sure}], "managers": ["ufw"], "peers": ["192.168.77.1"]}
    seen = facts(tried(outcome))
    seen["knock"]["rules"] = {"readable": True, "reason": "", **rules}
    (found,) = judged(make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False))
    assert found.where == where
    if where is HERE:
        assert (found.code, found.confidence) == ("port-blocked", Confidence.CERTAIN)
        assert "nft inet fw output: tcp dport 29500 drop" in found.message
        assert found.fix == "on nd1: nft insert rule inet fw output ip daddr 192.168.77.1 accept"


@pytest.mark.parametrize(
    ("beside", "words"),
    [("refused", "while port 29501 there does"), ("dropped", "no answer at all")],
)
def test_a_silent_port_beside_one_that_answers(beside: str, words: str):
    seen = facts(tried("dropped"))
    seen["knock"]["neighbour"] = {"port": 29501, "outcome": beside}
    (found,) = judged(make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False))
    assert (found.code, found.where) == ("port-blocked", LINK)
    assert words in found.message


def test_a_service_mesh_on_the_callers_side_may_be_who_answered():
    (found,) = view_of_nd1(tried("connected", "silent"), mesh="a listener on port 15001")
    assert (found.code, found.where) == ("port-not-the-store", LINK)
    assert "sidecar.istio.io/inject" in found.fix
    assert "15001" in found.fix


def test_in_a_merged_report_only_who_never_came_in_tells_of_the_road():
    hosts = {"nd0": facts(server="self"), "nd1": facts(tried("refused")), "nd2": facts()}
    made = make_cluster(tuple(hosts), check="port", by_host=hosts)
    assert judged(made) == []
    (found,) = judged(shut_out(made, "nd1", "nd2"))
    assert (found.code, found.where) == ("port-refused", LINK)


def test_the_port_in_use_is_rank_0s_alone_and_names_who_holds_it():
    holder = {"state": "listening", "uid": 0, "pid": 4711, "command": "python -m http.server"}
    taken = facts(
        server="self", bind_errno=errno.EADDRINUSE, bind_error="Address in use", holder=holder
    )
    del taken["knock"]
    (found,) = judged(make_cluster(("nd0",), check="port", by_host={"nd0": taken}, complete=False))
    assert (found.code, found.where) == ("port-in-use", Where(hosts=("nd0",)))
    assert "4711" in found.message
    assert "python -m http.server" in found.message
    for unseen in ({**holder, "pid": None, "uid": 1001}, None):
        (found,) = judged(
            make_cluster(
                ("nd0",), check="port", by_host={"nd0": {**taken, "holder": unseen}}, complete=False
            )
        )
        assert "cannot see" in found.message
        assert "29500" in found.fix


def test_a_port_under_the_agent_is_never_in_use_privileged_or_at_risk():
    held = facts(server="agent", ephemeral=[32768, 60999], port=40000, may_bind=False)
    hosts = {"nd0": held, "nd1": held}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []


def test_a_privileged_port():
    low = facts(
        server="self", port=80, bind_errno=errno.EACCES, bind_error="Denied", may_bind=False
    )
    del low["knock"]
    hosts = {"nd0": low, "nd1": facts(port=80, may_bind=False)}
    (found,) = judged(make_cluster(tuple(hosts), check="port", by_host=hosts))
    assert (found.code, found.where) == ("port-privileged", Where(hosts=("nd0",)))
    assert found.level is Severity.FAIL
    assert "80" in found.message


def test_an_ephemeral_port_is_a_risk_where_it_is_served():
    risky = {"port": 40000, "ephemeral": [32768, 60999]}
    hosts = {"nd0": facts(server="self", **risky), "nd1": facts(**risky)}
    (found,) = judged(make_cluster(tuple(hosts), check="port", by_host=hosts))
    assert (found.code, found.where) == ("port-ephemeral", Where(hosts=("nd0",)))
    assert found.level is Severity.WARN


def test_rank_0_that_does_not_find_itself_at_master_addr_says_so():
    """The coordinator reaches the store that it serves on loopback; nobody else came."""
    hosts = {"nd0": facts(tried("refused"), server="self"), "nd1": facts()}
    cluster = make_cluster(tuple(hosts), check="port", by_host=hosts, absent_nodes=(1,))
    (found,) = judged(cluster)
    assert (found.code, found.where) == ("port-refused", Where(hosts=("nd0",)))
    assert "this host serves the store" in found.message
    assert "192.168.77.1" in found.fix


# -- observe: real sockets on loopback -----------------------------------------------------------


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
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False, use_libuv={libuv})
print(store.port, flush=True)
time.sleep(60)
"""
HTTP = """
import http.server
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("agent", [True, False])
def test_a_store_is_recognised_at_once(libuv: bool, agent: bool):
    with child(STORE.format(port=0, libuv=libuv)) as port:
        found, took = observed(context(port, agent_store=agent, door=AGENT if agent else OTHER))
    assert found["knock"]["last"]["answer"] == "store"
    assert found["knock"]["knocks"] == 1
    assert took < 2.0


def test_a_store_that_comes_late_is_waited_for():
    port = free_port()
    late = f"import time; time.sleep(1)\n{STORE.format(port=port, libuv=True)}"
    process = subprocess.Popen([sys.executable, "-c", late], stdout=subprocess.DEVNULL)
    try:
        found, _ = observed(context(port, join_timeout_s=30.0))
    finally:
        process.kill()
        process.wait(timeout=10)
    assert found["knock"]["first"]["outcome"] == "refused"
    assert found["knock"]["last"]["answer"] == "store"
    assert (
        judged(make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)) == []
    )


def test_a_closed_port_is_refused_until_just_before_the_deadline():
    port = free_port()
    found, took = observed(context(port))
    last = found["knock"]["last"]
    assert (last["outcome"], last["answer"]) == ("refused", "")
    assert found["knock"]["knocks"] > 2
    assert 1.0 < took < 3.0
    (finding,) = judged(
        make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)
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
    (finding,) = judged(
        make_cluster(("nd1",), check="port", by_host={"nd1": found}, complete=False)
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
    with child(STORE.format(port=0, libuv=True)) as port:  # a store listens on both families
        found, _ = observed(context(port, host))
    assert found["knock"]["last"]["answer"] == "store"


def test_what_cannot_be_tested_is_said():
    for ctx in (context(None), context(29500, None)):
        with pytest.raises(Untested, match="not set"):
            CHECK.observe(ctx)
    with pytest.raises(Untested, match="does not resolve"):
        CHECK.observe(context(29500, "bad..label"))


def test_outside_a_job_there_is_no_port_to_test():
    with pytest.raises(Skip, match="nothing launched here"):
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
