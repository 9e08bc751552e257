"""Made-up RoCE rails that call each other, rail by rail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Finding,
    Launch,
    Level,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.checks.rail_reach import RailReach
from nccl_doctor.checks.rail_reach.neighbours import neighbour
from nccl_doctor.toolkit.net.dial import Origin
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.schedule import schedule_of
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.peers import DROPPED, NO_ROUTE, OK, REFUSED, stuck

CHECK = RailReach()
RAILS = 2
Call = tuple[str, int, str, int]
"""From (host, rail) to (host, rail)."""


class World:
    """Healthy hosts with two rails each, to be spoilt by a test."""

    def __init__(self, count: int, cross: bool = False) -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.calls: dict[Call, dict[str, Any]] = {}
        for a, b in permutations(self.names, 2):
            for rail in range(RAILS):
                for to in {rail, (rail + 1) % RAILS} if cross else {rail}:
                    self.calls[a, rail, b, to] = {"attempts": [OK], "neighbour": ""}
        self.rails = {
            name: [
                {
                    "name": f"mlx5_{n}:1",
                    "pci": f"0000:{0x3A + n:x}:00.0",
                    "numa": 0,
                    "state": "ACTIVE",
                    "subnet": f"10.0.{n}.0/24",
                    "nic": f"eth{n}",
                    "address": f"10.0.{n}.{index + 1}",
                }
                for n in range(RAILS)
            ]
            for index, name in enumerate(self.names)
        }
        self.road = "infiniband"
        self.settings: dict[str, Any] = {}

    def of(self, host: str, rail: int, way: str = "both") -> list[Call]:
        ends = {"out": [0], "in": [2], "both": [0, 2]}[way]
        return [c for c in self.calls if any((c[e], c[e + 1]) == (host, rail) for e in ends)]

    def spoil(
        self, calls: Iterable[Call], attempt: Mapping[str, Any], neighbour: str = "", times: int = 2
    ) -> World:
        for call in calls:
            self.calls[call] = {"attempts": [dict(attempt)] * times, "neighbour": neighbour}
        return self

    def seat(self, name: str) -> int:
        return 2 * self.names.index(name)

    def cluster(self, **fields: Any) -> Cluster:
        """As re-read from a saved report."""
        made = make_cluster(self.names, backend="nccl", **fields)
        hosts = []
        for host in made.hosts:
            name = str(host.name)
            calls = [
                {
                    "rail": call[1],
                    "source": self.rails[name][call[1]]["address"],
                    "seat": self.seat(call[2]),
                    "to": call[3],
                    "address": self.rails[call[2]][call[3]]["address"],
                    "interface": self.rails[call[2]][call[3]]["nic"],
                    "port": 40000,
                    **said,
                }
                for call, said in self.calls.items()
                if call[0] == name
            ]
            seen = {
                "rdma": {ALONE: outcome({"road": self.road})},
                "rails": {ALONE: outcome({"rails": self.rails[name]})},
                "rail_reach": {
                    "matrix": outcome({"rails": self.rails[name], "calls": calls, **self.settings})
                },
            }
            hosts.append(replace(host, facts=reread(seen)))
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        return replace(made, hosts=tuple(hosts), ranks=tuple(ranks))

    def judge(self) -> list[Finding]:
        return judge(CHECK, self.cluster())

    def only(self, code: str, **where: Any) -> Finding:
        return only(CHECK, self.cluster(), code, **where)


def test_healthy_rails_are_fine() -> None:
    assert World(4).judge() == []
    assert World(2, cross=True).judge() == []


def test_a_cable_in_the_wrong_port() -> None:
    world = World(4)
    found = world.spoil(world.of("nd2", 1), DROPPED, "silent").only(
        "rail-unreachable", hosts=["nd2"], interfaces=["mlx5_1:1"]
    )
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "mlx5_1:1 (eth1): no host answers for the address on the local network" in found.message
    assert "on nd0: ping -c 3 -I eth1 10.0.1.3" in found.fix


def test_what_to_type_leads_to_the_bad_host_whoever_signed_in_first() -> None:
    world = World(3)
    found = world.spoil(world.of("nd0", 1), DROPPED, "silent").only(
        "rail-unreachable", hosts=["nd0"], interfaces=["mlx5_1:1"]
    )
    assert "on nd1: ping -c 3 -I eth1 10.0.1.1" in found.fix


def test_all_rails_of_a_host_are_one_finding() -> None:
    world = World(3)
    for rail in range(RAILS):
        world.spoil(world.of("nd1", rail), NO_ROUTE)
    found = world.only("rail-unreachable", hosts=["nd1"], interfaces=["mlx5_0:1", "mlx5_1:1"])
    assert found.level is Severity.FAIL


def test_of_two_hosts_only_the_link_is_named() -> None:
    world = World(2)
    found = world.spoil(world.of("nd1", 0), DROPPED, "silent").only(
        "rail-unreachable",
        links=[("nd0", "nd1"), ("nd1", "nd0")],
        interfaces=["mlx5_0:1"],
    )
    assert found.confidence is Confidence.POSSIBLE


def test_one_link_of_a_rail() -> None:
    world = World(4)
    calls = [("nd1", 0, "nd3", 0), ("nd3", 0, "nd1", 0)]
    world.spoil(calls, DROPPED).only(
        "rail-unreachable", links=[("nd1", "nd3"), ("nd3", "nd1")], interfaces=["mlx5_0:1"]
    )


@pytest.mark.parametrize("attempt", [DROPPED, REFUSED])
def test_what_a_firewall_may_have_done_is_a_possibility(attempt: dict[str, Any]) -> None:
    world = World(3)
    found = world.spoil(world.of("nd1", 0, "in"), attempt, "answers").only(
        "rail-unreachable", hosts=["nd1"], interfaces=["mlx5_0:1"]
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)


def test_a_switch_port_without_jumbo_frames() -> None:
    world = World(4)
    world.spoil(world.of("nd2", 1, "in"), stuck("upload"))
    world.spoil(world.of("nd2", 1, "out"), stuck("download"))
    found = world.only("rail-mtu-blackhole", hosts=["nd2"], interfaces=["mlx5_1:1"])
    assert found.level is Severity.WARN
    assert "1 MiB stopped for 3 s" in found.message


def test_rails_that_are_apart_in_a_run_with_cross_nic() -> None:
    world = World(3, cross=True)
    cross = [call for call in world.calls if call[1] != call[3]]
    found = world.spoil(cross, NO_ROUTE).judge()
    assert {f.code for f in found} == {"rail-unreachable"}
    # Their networks differ: where check `rails` finds another order, that is the reason.
    assert {f.explained_by for f in found} == {"rail-order-differs"}
    assert all(f.where.links and not f.where.hosts for f in found)


def test_rails_that_are_apart_on_purpose_need_a_setting() -> None:
    world = World(3, cross=True)
    world.settings = {"cross_nic": 1, "pxn": True}
    found = world.spoil([c for c in world.calls if c[1] != c[3]], NO_ROUTE).judge()
    assert {f.code for f in found} == {"rail-unreachable"}
    assert all(f.fix.startswith("on every host: export NCCL_CROSS_NIC=0; or on ") for f in found)


class TestApart:
    """NCCL_CROSS_NIC=2, the default."""

    def world(self, pxn: bool = True) -> World:
        world = World(3, cross=True)
        world.settings = {"cross_nic": 2, "pxn": pxn}
        return world

    def test_rails_that_reach_each_other(self) -> None:
        assert self.world().judge() == []

    @pytest.mark.parametrize(("pxn", "level"), [(True, Severity.INFO), (False, Severity.WARN)])
    def test_rails_that_do_not(self, pxn: bool, level: Severity) -> None:
        world = self.world(pxn)
        cross = [call for call in world.calls if call[1] != call[3]]
        found = world.spoil(cross, DROPPED).only("rails-apart", hosts=["nd0", "nd1", "nd2"])
        assert found.level is level
        assert found.message.startswith("12 of 12 calls to the next rail of another host failed (")
        assert ("NCCL_PXN_DISABLE=1" in found.message) is not pxn
        assert found.kind.fix == "on every host: export NCCL_CROSS_NIC=0"

    def test_a_broken_rail_is_not_apart(self) -> None:
        world = self.world()
        world.spoil(world.of("nd1", 1), DROPPED, "silent")
        world.only("rail-unreachable", hosts=["nd1"], interfaces=["mlx5_1:1"])

    def test_large_packets_between_rails_say_nothing(self) -> None:
        world = self.world()
        cross = [call for call in world.calls if call[1] != call[3]]
        assert world.spoil(cross, stuck("upload")).judge() == []


def test_a_call_that_failed_once_says_nothing() -> None:
    world = World(3)
    assert world.spoil(world.of("nd1", 0), DROPPED, times=1).judge() == []


def test_a_host_that_read_late_has_no_bad_rail() -> None:
    world = World(3)
    calls = world.of("nd2", 1, "in")
    world.spoil(calls, {"outcome": "intercepted", "detail": "silent", "duration_s": 3.0})
    assert [found.code for found in world.judge()] == ["rail-unreachable"]
    world.settings["late"] = {world.rails[call[0]][1]["address"]: 3.1 for call in calls}
    assert world.judge() == []


def test_who_did_not_report_is_not_called_broken() -> None:
    world = World(3)
    world.spoil(world.of("nd2", 0, "in"), DROPPED)
    cluster = world.cluster()
    hosts = [
        replace(h, facts={**h.facts, "rail_reach": {}}) if h.name == "nd2" else h
        for h in cluster.hosts
    ]
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    assert judge(CHECK, replace(cluster, hosts=tuple(hosts), ranks=ranks)) == []


class TestPlan:
    """Who takes part."""

    def test_one_seat_of_every_host(self) -> None:
        (matrix,) = CHECK.plan(World(3).cluster())
        assert (matrix.name, matrix.groups, matrix.may_shrink) == ("matrix", ((0, 2, 4),), True)

    def test_many_hosts_call_few_partners_on_every_rail(self) -> None:
        world = World(1)
        names = [f"nd{i}" for i in range(70)]
        made = make_cluster(names, 1, backend="nccl", run_id="a run")
        rail = world.rails["nd0"]
        lame = [rail[0], {**rail[1], "state": "DOWN"}]
        hosts = [
            replace(
                host,
                facts={
                    "rdma": {ALONE: outcome({"road": "infiniband"})},
                    "rails": {ALONE: outcome({"rails": lame if host.id % 9 == 0 else rail})},
                },
            )
            for host in made.hosts
        ]
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        made = replace(made, hosts=tuple(hosts), ranks=tuple(ranks))
        (few,) = CHECK.plan(made)
        schedule = schedule_of(few.groups[0], few.params)
        assert schedule is not None
        assert schedule.rails[0] == (0,)
        assert len(schedule.rails) == 70
        assert all(11 <= len(schedule.partners(seat)) + 1 <= 14 for seat in few.groups[0])
        (full,) = CHECK.plan(replace(made, level=Level.FULL))
        assert full.params["schedule"]["all_pairs"]

    @pytest.mark.parametrize("road", ["sockets", "efa", "none"])
    def test_where_nccl_takes_another_road(self, road: str) -> None:
        world = World(3)
        world.road = road
        with pytest.raises(Skip, match="no two hosts with RoCE rails"):
            CHECK.plan(world.cluster())

    @pytest.mark.parametrize(
        "change", [{"state": "DOWN"}, {"address": ""}, {"nic": "", "address": ""}]
    )
    def test_rails_that_cannot_be_called(self, change: dict[str, str]) -> None:
        world = World(2)
        world.rails["nd1"] = [{**rail, **change} for rail in world.rails["nd1"]]
        with pytest.raises(Skip, match="no two hosts"):
            CHECK.plan(world.cluster())

    def test_a_cluster_without_rdma(self) -> None:
        with pytest.raises(Skip, match="no two hosts"):
            CHECK.plan(make_cluster(["nd0", "nd1"]))


class OtherHost:
    """A peer whose listeners are at hand."""

    def __init__(self, doors: list[dict[str, Any]]) -> None:
        self.posts: dict[str, dict[int, Any]] = {
            "listen": {4: doors},
            "done": {4: True},
            "gone": {},
        }

    def post(self, tag: str, value: Any) -> None:
        self.posts[tag][0] = json.loads(json.dumps(value))

    def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
        return self.posts[tag]

    def store(self) -> Any:
        raise AssertionError("no process group is needed")


def context(root: Path, peers: OtherHost | None, **env: str) -> Context:
    return Context(
        launch=Launch(),
        root=root,
        env={"NCCL_CONF_FILE": "/nonexistent", **env},
        backend="nccl",
        round="matrix",
        group=(0, 4) if peers else (0,),
        seat=0,
        peers=peers,
    )


def loopback_rails(root: Path) -> None:
    """Two rails on addresses of loopback."""
    for number, address in enumerate(("7f00:0002", "7f00:0003")):
        gids = fabrics.roce_gids(address)
        fabrics.add_device(
            root, f"mlx5_{number}", layer="Ethernet", pci=f"0000:{0x3A + number:x}:00.0", gids=gids
        )
        (root / f"sys/class/infiniband/mlx5_{number}/ports/1/gid_attrs/ndevs/0").write_text("lo")


SAME, NEXT = [(0, 0), (1, 1)], [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("env", "level", "pairs"),
    [
        ({"NCCL_CROSS_NIC": "0"}, Level.FULL, SAME),
        ({"NCCL_CROSS_NIC": "1"}, Level.STANDARD, NEXT),
        ({"NCCL_CROSS_NIC": "2"}, Level.STANDARD, SAME),
        ({}, Level.STANDARD, SAME),
        ({}, Level.FULL, NEXT),
        ({"NCCL_PXN_DISABLE": "1"}, Level.STANDARD, NEXT),
    ],
)
def test_observing_calls_the_same_rail(
    tmp_path: Path, env: dict[str, str], level: Level, pairs: list[tuple[int, int]]
) -> None:
    loopback_rails(tmp_path)
    with Listeners([Origin("127.0.0.4", "lo"), Origin("127.0.0.5", "lo")]) as listeners:
        doors = [
            {"rail": rail, "name": f"mlx5_{rail}:1", "interface": "lo", **door.to_json()}
            for rail, door in enumerate(listeners.doors)
        ]
        ctx = replace(context(tmp_path, OtherHost(doors), **env), level=level)
        facts = CHECK.observe(ctx)
    assert [(call["rail"], call["to"]) for call in facts["calls"]] == pairs
    assert all(call["attempts"][-1]["outcome"] == "ok" for call in facts["calls"])
    assert {call["source"] for call in facts["calls"]} == {"127.0.0.2", "127.0.0.3"}
    assert facts["not_bound"] == {}
    assert all(door["token"] not in json.dumps(facts) for door in doors)


def test_observing_an_interface_that_is_gone(tmp_path: Path) -> None:
    loopback_rails(tmp_path)
    ndev = tmp_path / "sys/class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0"
    ndev.write_text("gone0")
    with Listeners(["127.0.0.4", "127.0.0.5"]) as listeners:
        doors = [
            {"rail": rail, "name": f"mlx5_{rail}:1", "interface": "lo", **door.to_json()}
            for rail, door in enumerate(listeners.doors)
        ]
        facts = CHECK.observe(context(tmp_path, OtherHost(doors)))
    assert list(facts["not_bound"]) == ["127.0.0.3"]
    assert [call["attempts"][-1]["outcome"] for call in facts["calls"]] == ["ok", "error"]


def test_nobody_else_signed_in(tmp_path: Path) -> None:
    loopback_rails(tmp_path)
    with pytest.raises(Untested, match="signed in"):
        CHECK.observe(context(tmp_path, None))


def test_what_the_kernel_knows_of_neighbours(tmp_path: Path) -> None:
    head = "IP address       HW type     Flags       HW address            Mask     Device"
    lines = [
        "10.0.0.2         0x1         0x2         02:42:0a:00:00:02     *        eth1",
        "10.0.0.3         0x1         0x0         00:00:00:00:00:00     *        eth1",
    ]
    fabrics.write(tmp_path, "proc/net/arp", "\n".join([head, *lines]))
    assert neighbour("10.0.0.2", "eth1", tmp_path) == "answers"
    assert neighbour("10.0.0.3", "eth1", tmp_path) == "silent"
    assert neighbour("10.0.0.2", "eth0", tmp_path) == ""
    assert neighbour("10.9.0.1", "eth1", tmp_path) == ""
    assert neighbour("10.0.0.2", "eth1", tmp_path / "masked") == ""
