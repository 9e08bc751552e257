"""Silent connections: rules on made-up hosts, and real sockets with a firewall that forgets."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    BEFORE,
    Cluster,
    Confidence,
    Context,
    Effect,
    Job,
    Launch,
    Level,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Turn,
    Untested,
)
from nccl_doctor.checks.held_connections import (
    _AFTER_S,
    _START_S,
    HOLD,
    THROUGH,
    HeldConnections,
    partners,
)
from nccl_doctor.checks.held_connections import talk as talking
from nccl_doctor.checks.held_connections.listeners import CALLER, LISTENER, Listener
from nccl_doctor.checks.held_connections.talk import Held, begin, end, hold
from nccl_doctor.checks.held_connections.through import ask_all, begin_all
from nccl_doctor.judge.causes import explain
from nccl_doctor.observe.handoff import SocketPairHandoff
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = HeldConnections()
Link = tuple[str, str]
IDLE_S = 60.0
LENGTHS = (("caller", 60.0), ("listener", 60.0), ("caller", 30.0), ("caller", 15.0))


class World:
    """Hosts whose connections all survive, to be spoilt by a test."""

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.backend = backend
        self.data = "sockets"
        self.round = HOLD
        self.tracking: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.held: dict[Link, list[Held]] = {
            link: [Held(first, idle_s, "ok") for first, idle_s in LENGTHS] for link in self.links
        }

    @property
    def links(self) -> list[Link]:
        return list(permutations(self.names, 2))

    def touching(self, name: str) -> list[Link]:
        return [link for link in self.links if name in link]

    def lose(
        self,
        links: list[Link],
        least_s: float = 45.0,
        first: str = "",
        outcome: str = "silent",
        fresh: str = "ok",
    ) -> World:
        for link in links:
            self.held[link] = [
                replace(each, outcome=outcome, after_s=each.idle_s, fresh=fresh)
                if each.idle_s >= least_s and first in ("", each.first)
                else each
                for each in self.held[link]
            ]
        return self

    def facts(self, name: str) -> dict[str, Any]:
        peers = {
            str(2 * self.names.index(other)): [
                {"address": "192.168.77.9", "interface": "eth0", **each.to_json()}
                for each in self.held[name, other]
            ]
            for other in self.names
            if other != name
        }
        return {"idle_s": IDLE_S, "nccl_data": self.data, "peers": peers, "not_bound": {}}

    def cluster(self) -> Cluster:
        job = Job(hold_idle_s=IDLE_S if self.round == HOLD else None)
        made = make_cluster(self.names, backend=self.backend, job=job)
        hosts = []
        for host in made.hosts:
            name = host.name or ""
            of_host = {CHECK.name: {self.round: outcome(self.outcomes.get(name, self.facts(name)))}}
            if name in self.tracking:
                told = outcome({"established_s": self.tracking[name], "loose": 1})
                of_host["idle_connections"] = {ALONE: told}
            hosts.append(replace(host, facts=reread(of_host)))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        return replace(made, hosts=tuple(hosts), ranks=ranks)


# Rules


def test_connections_that_survive_are_no_finding() -> None:
    assert judge(CHECK, World(3).cluster()) == []


def test_a_host_that_loses_all_its_connections_is_named() -> None:
    world = World(4)
    lost = world.touching("nd2")
    found = only(
        CHECK, world.lose(lost).cluster(), "idle-connection-lost", hosts=["nd2"], links=sorted(lost)
    )
    assert found.level is Severity.FAIL
    assert found.confidence is Confidence.CERTAIN
    assert found.message == (
        "no answer on connections that were silent for 60 s, while a new connection between the "
        "same hosts works at once; 30 s of silence do no harm (6 ordered pairs)"
    )
    assert "KEEPIDLE=30 KEEPINTVL=30" in found.fix.alternatives[-1]
    assert "TcpEstablishedTimeout=432000" in found.fix.alternatives[0]
    assert len(found.evidence["connections"]) == 5


def test_a_link_between_hosts_that_are_well_with_others_names_no_host() -> None:
    world = World(4)
    lost = [("nd1", "nd2"), ("nd2", "nd1")]
    found = only(CHECK, world.lose(lost).cluster(), "idle-connection-lost", links=lost)
    assert found.confidence is Confidence.CERTAIN


def test_of_two_hosts_none_is_named() -> None:
    world = World(2)
    made = world.lose(world.links).cluster()
    found = only(CHECK, made, "idle-connection-lost", links=world.links)
    assert found.confidence is Confidence.POSSIBLE


def test_the_host_whose_kernel_forgets_by_then_is_named() -> None:
    world = World(2).lose([("nd0", "nd1"), ("nd1", "nd0")])
    world.tracking = {"nd0": 432000, "nd1": 45}
    found = only(CHECK, world.cluster(), "idle-connection-lost", hosts=["nd1"], links=world.links)
    assert found.confidence is Confidence.LIKELY
    assert "nf_conntrack_tcp_timeout_established=45" in found.message
    assert found.fix == (
        "on nd1: sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000"
    )


@each_row(
    "tracking, hosts",
    [
        ({"nd0": 45}, []),  # it explains none of what nd2 loses with the others
        ({"nd2": 61}, []),
        ({"nd0": 45, "nd1": 45, "nd2": 45}, ["nd0", "nd1", "nd2"]),
    ],
)
def test_a_kernel_explains_only_its_own_losses(tracking: dict[str, int], hosts: list[str]) -> None:
    world = World(3)
    world.lose(world.links).tracking = tracking
    (found,) = judge(CHECK, world.cluster())
    assert sorted(found.where.hosts) == hosts


@each_row(
    "changes, words",
    [
        ({"least_s": 15.0}, "no answer on connections that were silent for 15 s, while"),
        ({"outcome": "reset"}, "reset on connections that were silent for 60 s"),
        ({"outcome": "closed"}, "closed by neither end on connections that were silent"),
        ({"first": "listener"}, "; only where the side that was called speaks first"),
        ({"first": "caller"}, "; only where the side that called speaks first"),
    ],
)
def test_the_message_says_what_happened(changes: Mapping[str, Any], words: str) -> None:
    world = World(3)
    world.lose(world.links, **changes)
    (found,) = judge(CHECK, world.cluster())
    assert words in found.message
    shorter = changes.get("first") != "listener" and "least_s" not in changes
    assert ("30 s of silence do no harm" in found.message) is shorter


def test_a_loss_after_which_no_new_connection_works_is_not_of_the_silence() -> None:
    world = World(3)
    made = world.lose(world.touching("nd1"), fresh="no answer").cluster()
    assert judge(CHECK, made) == []


@each_row("status", [OutcomeStatus.HUNG, OutcomeStatus.DIED, OutcomeStatus.SILENT])
def test_a_host_that_was_lost_meanwhile_is_not_blamed(status: OutcomeStatus) -> None:
    world = World(3)
    world.lose(world.touching("nd1")).outcomes["nd1"] = Outcome(status)
    assert judge(CHECK, world.cluster()) == []


@each_row(
    "backend, data, level",
    [
        ("gloo", "infiniband", Severity.FAIL),
        ("nccl", "sockets", Severity.FAIL),
        ("nccl", "infiniband", Severity.WARN),
    ],
)
def test_where_data_goes_by_infiniband_it_is_a_warning(
    backend: str, data: str, level: Severity
) -> None:
    world = World(3, backend)
    world.data = data
    (found,) = judge(CHECK, world.lose(world.touching("nd1")).cluster())
    assert found.level is level


def test_a_silence_for_which_nobody_asked_is_a_warning() -> None:
    world = World(3)
    world.round = THROUGH
    lost = world.touching("nd1")
    made = world.lose(lost).cluster()
    found = only(CHECK, made, "idle-connection-lost", hosts=["nd1"], links=sorted(lost))
    assert found.level is Severity.WARN
    assert "silent for 60 s" in found.message


def test_it_explains_nothing_of_the_examination() -> None:
    world = World(3)
    made = world.lose(world.touching("nd1")).cluster()
    (found,) = explain(judge(CHECK, made), made)
    assert found.has(Effect.JOB_ONLY)
    assert found.explained_by is None


# The plan


def test_it_is_held_only_where_it_is_asked_for_and_last() -> None:
    with pytest.raises(Skip, match="--hold-idle SECONDS was not given"):
        CHECK.plan(make_cluster(level=Level.STANDARD))
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"], job=Job(hold_idle_s=5.0)))
    made = make_cluster(["nd0", "nd1", "nd2"], job=Job(hold_idle_s=300.0), absent_nodes=[1])
    (round_,) = CHECK.plan(made)
    assert round_.groups == ((0, 4),)
    assert round_.params["idle_s"] == 300.0
    assert 300 + _START_S + _AFTER_S < round_.deadline_s < 360


def test_level_full_holds_it_from_before_all_other_rounds_to_the_end() -> None:
    assert CHECK.turn is Turn.LAST
    made = make_cluster(["nd0", "nd1", "nd2"], level=Level.FULL, absent_nodes=[1])
    assert [(each.name, each.groups) for each in CHECK.plan(made)] == [
        (BEFORE, ((0, 4),)),
        (THROUGH, ((0, 4),)),
    ]
    asked = make_cluster(level=Level.FULL, job=Job(hold_idle_s=300.0))
    assert [each.name for each in CHECK.plan(asked)] == [HOLD]


def test_the_times_are_those_of_the_connections() -> None:
    assert (_START_S, _AFTER_S) == (talking.START_S, talking.AFTER_S)


@each_row("count", [2, 3, 17, 18, 100, 1000])
def test_each_host_connects_to_few_and_all_together_to_everybody(count: int) -> None:
    group = tuple(range(0, 3 * count, 3))
    ctx = Context(Launch(launcher="plain"), {}, group=group, seat=group[count // 2])
    mine = partners(ctx)
    assert ctx.seat not in mine
    assert len(mine) == len(set(mine)) == (count - 1 if count < 18 else math.ceil(math.log2(count)))


# Real sockets


@pytest.fixture
def home() -> Iterator[Listener]:
    one = Listener.at("127.0.0.1")
    yield one
    one.close()


class Forgetful:
    """A firewall that drops, or resets, what comes on a connection silent for some time.

    It counts from what came last: a caller that a busy machine holds up before its first word is
    not silent yet.
    """

    def __init__(self, target: int, after_s: float, *, resets: bool = False) -> None:
        self.port = 0
        self._after_s, self._resets, self._target = after_s, resets, target
        self._seen: dict[frozenset[socket.socket], float] = {}
        self._ends: dict[socket.socket, socket.socket] = {}
        self._over = threading.Event()

    def __enter__(self) -> Forgetful:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(10)
        for sock in (self._server, *self._ends):
            sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select(0.02):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is self._server:
                        ends = self._server.accept()[0], self._call()
                        self._ends.update([ends, ends[::-1]])
                        for each in ends:
                            selector.register(each, selectors.EVENT_READ)
                    elif not self._pass_on(key.fileobj):
                        selector.unregister(key.fileobj)

    def _call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._target))

    def _pass_on(self, sock: socket.socket) -> bool:
        pair = frozenset((sock, self._ends[sock]))
        with contextlib.suppress(OSError):
            data = sock.recv(4096)
            now = time.monotonic()
            if now - self._seen.get(pair, now) > self._after_s:
                if data and self._resets:
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    sock.close()
                return bool(data) and not self._resets
            self._seen[pair] = now
            if not data:
                self._ends[sock].shutdown(socket.SHUT_WR)
            self._ends[sock].sendall(data)
            return bool(data)
        return False


def test_connections_without_a_firewall_survive(home: Listener) -> None:
    plan = [(CALLER, 0.4), (LISTENER, 0.4), (CALLER, 0.1)]
    started = time.monotonic()
    (made,) = hold([home], [home.door], plan)
    assert [(each.first, each.idle_s, each.outcome) for each in made] == [
        ("caller", 0.4, "ok"),
        ("listener", 0.4, "ok"),
        ("caller", 0.1, "ok"),
    ]
    assert made[0].to_json() == {"first": "caller", "idle_s": 0.4, "outcome": "ok"}
    assert time.monotonic() - started < 4


@pytest.mark.parametrize(("resets", "outcome"), [(False, "silent"), (True, "reset")])
def test_what_a_firewall_forgets_is_lost_and_a_new_connection_works(
    home: Listener, resets: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talking, "PATIENCE_S", 1.0)
    monkeypatch.setattr(talking, "AFTER_S", 3.0)
    with Forgetful(home.door.port, 1.2, resets=resets) as between:
        door = replace(home.door, port=between.port)
        (made,) = hold([home], [door], [(CALLER, 1.8), (LISTENER, 1.8), (CALLER, 0.2)])
    first, second, short = made
    assert (first.outcome, first.fresh, first.heard) == (outcome, "ok", False)
    assert 1.8 <= first.after_s < 3
    # The firewall resets the side that spoke; the one that waits hears nothing.
    assert (second.outcome, second.fresh) == ("silent", "ok")
    assert short.outcome == "ok"


def test_connections_that_nobody_serves_meanwhile_survive(home: Listener) -> None:
    begun = begin([home.door], [CALLER, LISTENER])
    made = end([home], begun, 0.0, lambda: None)
    assert [(each.first, each.outcome) for each in made] == [("caller", "ok"), ("listener", "ok")]


def test_what_is_forgotten_through_the_run_is_lost_and_a_new_connection_works(
    home: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talking, "PATIENCE_S", 0.5)
    with Forgetful(home.door.port, 0.1) as between:
        begun = begin([replace(home.door, port=between.port)], [CALLER, LISTENER])
        time.sleep(0.3)
        made = end([home], begun, 42.0, lambda: None)
    told = [(each.outcome, each.after_s, each.fresh, each.heard) for each in made]
    assert told == [("silent", 42.0, "ok", False)] * 2


def test_a_connection_that_is_cut_in_the_silence_says_when(home: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = replace(home.door, port=server.getsockname()[1])

        def cut() -> None:
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(door.answer.encode())
                time.sleep(0.3)
                server.close()

        thread = threading.Thread(target=cut)
        thread.start()
        server.settimeout(5)
        ((lost,),) = hold([home], [door], [(CALLER, 5.0)])
        thread.join(10)
    assert lost.outcome == "closed"
    assert 0.2 < lost.after_s < 3
    assert lost.fresh != "ok"


def test_nobody_without_the_token_is_answered(home: Listener) -> None:
    wrong = replace(home.door, token="0" * 32)
    ((held,),) = hold([home], [wrong], [(CALLER, 0.1)])
    assert held.outcome == "untested"
    assert "no proof of identity" in held.detail


def test_another_service_is_no_partner(home: Listener) -> None:
    wrong = replace(home.door, answer="0" * 32)
    ((held,),) = hold([home], [wrong], [(CALLER, 0.1)])
    assert (held.outcome, held.detail) == ("untested", "another service answered")


class Table:
    """Peers of two participants in one process."""

    def __init__(self, seats: tuple[int, ...]) -> None:
        self._seats = seats
        self._there = threading.Condition()
        self._said: dict[tuple[str, int], str] = {}

    def of(self, seat: int) -> Any:
        table = self

        class Mine:
            def post(self, tag: str, value: Any) -> None:
                with table._there:
                    table._said[tag, seat] = json.dumps(value)
                    table._there.notify_all()

            def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
                with table._there:
                    table._there.wait_for(
                        lambda: all((tag, each) in table._said for each in table._seats), timeout_s
                    )
                    said = table._said.items()
                    return {each: json.loads(text) for (name, each), text in said if name == tag}

        return Mine()


def context(seat: int, table: Table, left_s: float = 60.0, idle_s: float = 1.0) -> Context:
    return Context(
        Launch(launcher="plain", rank=seat),
        {"GLOO_SOCKET_IFNAME": "lo"},
        deadline=time.monotonic() + left_s,
        round=HOLD,
        group=(0, 2),
        seat=seat,
        params={"idle_s": idle_s, "nccl": {}},
        peers=table.of(seat),
    )


def both(observe: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None, None]

    def run(at: int) -> None:
        try:
            results[at] = observe(2 * at)
        except Untested as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return results


def test_two_hosts_hold_connections_to_each_other() -> None:
    table = Table((0, 2))
    one, other = both(lambda seat: CHECK.observe(context(seat, table)))
    for facts, peer in ((one, "2"), (other, "0")):
        assert list(facts["peers"]) == [peer]
        held = [(each["first"], each["idle_s"], each["outcome"]) for each in facts["peers"][peer]]
        assert held == [("caller", 1.0, "ok"), ("listener", 1.0, "ok")]
        assert "token" not in json.dumps(facts)


def test_two_hosts_hold_connections_through_the_run() -> None:
    handoffs = {0: SocketPairHandoff(), 2: SocketPairHandoff()}

    def observe(seat: int, table: Table, name: str) -> Mapping[str, Any]:
        ctx = replace(context(seat, table), round=name, handoff=handoffs[seat])
        return CHECK.observe(ctx)

    before, after = Table((0, 2)), Table((0, 2))
    assert both(lambda seat: observe(seat, before, BEFORE)) == [{"opened": 2}, {"opened": 2}]
    one, other = both(lambda seat: observe(seat, after, THROUGH))
    for facts, peer in ((one, "2"), (other, "0")):
        held = [(each["first"], each["outcome"]) for each in facts["peers"][peer]]
        assert held == [("caller", "ok"), ("listener", "ok")]
        assert facts["note"].startswith(f"silent for {facts['idle_s']:g} s: nothing is known of a")
        assert "token" not in json.dumps(facts)
    with pytest.raises(Untested, match="no connection was opened at the beginning"):
        observe(0, Table((0,)), THROUGH)


def test_sockets_for_which_there_is_no_room_are_untested(home: Listener) -> None:
    handoff = SocketPairHandoff()
    entry = {"interface": "lo", **home.door.to_json()}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    begin_all(handoff, [home], [(2, entry)], {})
    next_free = os.dup(0)
    os.close(next_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, before[1]))
        with pytest.raises(Untested, match=r"cannot be taken: .*Too many open files"):
            ask_all(replace(context(0, Table((0, 2))), handoff=handoff))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_little_time_is_untested_and_says_how_much_is_missing() -> None:
    table = Table((0, 2))
    for each in both(lambda seat: CHECK.observe(context(seat, table, idle_s=300.0))):
        assert isinstance(each, Untested)
        words = r"a silence of 300 s takes 326 s, and the run has (\d+) s left for it: give a "
        said = re.fullmatch(words + r"--timeout that is (\d+) s longer", str(each))
        assert said, each
        left_s, more_s = map(int, said.groups())
        assert 40 <= left_s <= 60  # a busy machine takes its time
        assert 327 <= left_s + more_s <= 340


def test_alone_it_is_untested() -> None:
    ctx = context(0, Table((0,)))
    with pytest.raises(Untested, match="no other host signed in"):
        CHECK.observe(replace(ctx, group=(0,)))
