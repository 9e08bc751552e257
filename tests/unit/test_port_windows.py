"""Ports that a firewall leaves open between hosts, and whether the job fits into them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.firewall.windows import open_windows
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.firewall.rulesets import parse_nft
from tests.support.clusters import outcome
from tests.support.findings import judge
from tests.support.peers import DROPPED, OK, World, only

TABLE = """table inet f {{
chain c {{
type filter hook input priority 0; policy {policy};
{rules}
}}
}}
"""
PACKET = Packet(True, "eth0", "10.0.0.2", "10.0.0.1", (32768, 60999), (32768, 60999))
LINK = ("nd0", "nd1")


@pytest.mark.parametrize(
    ("policy", "rules", "windows"),
    [
        ("drop", "tcp dport { 29500, 40000-40050 } accept", [(40000, 40050)]),
        ("accept", "tcp dport 32768-60999 drop", [(1024, 32767), (61000, 65535)]),
        ("accept", "tcp dport 1024-65535 drop", []),
        ("drop", "tcp dport 29500 accept", []),  # that of the store alone
        ("accept", "", [(1024, 65535)]),
        ("accept", "tcp dport @unknown drop", []),  # nothing is sure
    ],
)
def test_windows_in_the_rules(policy: str, rules: str, windows: list[tuple[int, int]]) -> None:
    chains = parse_nft(TABLE.format(policy=policy, rules=rules))
    assert open_windows(Rules(True, chains=chains), PACKET) == windows


def fix(windows: list[tuple[int, int]], backend: str = "gloo", **facts: Any) -> str:
    world = World(2, backend).fail([LINK], DROPPED).hit("nd1", LINK)
    world.rules["nd1"] |= {"open": windows, "reserved": "", **facts}
    return only(world.judge(), "peer-one-way").fix


def test_the_fix_names_the_range_inside_the_window_and_how_many_ports_are_needed() -> None:
    said = fix([(40000, 40050)])
    assert 'on nd1: sysctl -w net.ipv4.ip_local_port_range="40000 40050"' in said
    assert "(51 ports are open, about 16 needed)" in said
    assert "(51 ports are open, about 24 needed)" in fix([(40000, 40050)], "nccl")


def test_a_window_that_is_too_small_is_said_to_be() -> None:
    assert "on nd1 too few are open, 40000-40019 (the job needs about 24:" in fix(
        [(40000, 40019)], "nccl"
    )


def test_the_port_of_the_store_is_kept_free_inside_the_window() -> None:
    said = fix([(1024, 32767)], reserved="8080")
    assert "net.ipv4.ip_local_reserved_ports=8080,29500" in said


def test_without_a_window_there_is_one_way_alone() -> None:
    assert "ip_local_port_range" not in fix([])


def test_a_port_that_is_open_beside_one_that_is_not_shows_a_window_without_any_rule() -> None:
    world = World(2).fail([LINK], DROPPED)
    made = world.cluster()
    assert "is open and" not in only(judge(Firewall(), made), "peer-one-way").fix
    entry = {"address": "192.168.77.2", "port": 40012, "attempts": [OK]}
    facts = {**made.hosts[0].facts, "advertised_addresses": {"calls": outcome(reports(entry))}}
    host = replace(made.hosts[0], facts=facts)
    ranks = tuple(replace(r, host=host) if r.host.id == host.id else r for r in made.ranks)
    made = replace(made, hosts=(host, made.hosts[1]), ranks=ranks)
    said = only(judge(Firewall(), made), "peer-one-way").fix
    assert "port 40012 of 192.168.77.2 is open and 40002 is not" in said
    assert "the job needs about 24" in said


def reports(entry: dict[str, Any]) -> dict[str, Any]:
    return {"peers": {"2": [entry]}, "strangers": []}
