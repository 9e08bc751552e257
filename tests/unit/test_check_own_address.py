"""A host that calls itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Severity, Skip
from nccl_doctor.checks.own_address import OwnAddress
from nccl_doctor.toolkit.c10d import AGENT_NAMES, NAMES
from tests.support.clusters import make_cluster, shut_out, with_round
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = OwnAddress()


def seen(*outcomes: str) -> dict[str, Any]:
    calls = [{"outcome": o, "errno": None, "detail": "x", "duration_s": 0.1} for o in outcomes]
    return {"interface": "eth0", "address": "192.168.77.2", "calls": calls}


@pytest.mark.parametrize("outcomes", [["connected"], ["dropped", "connected"]])
def test_a_call_that_came_through_is_fine(outcomes: list[str]) -> None:
    by_host = {"nd0": seen("connected"), "nd1": seen(*outcomes)}
    assert judge(CHECK, make_cluster(check="own_address", by_host=by_host)) == []


@pytest.mark.parametrize("outcome", ["dropped", "refused", "rejected", "unreachable"])
def test_a_host_that_does_not_reach_itself_is_the_one_to_blame(outcome: str) -> None:
    by_host = {"nd0": seen("connected"), "nd1": seen(outcome, outcome)}
    made = make_cluster(check="own_address", by_host=by_host)
    found = only(CHECK, made, "own-address-blocked", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert f"192.168.77.2 on eth0: {outcome}" in found.message
    # The kernel has no way where the loopback interface is down.
    assert ("ip link set lo up" in found.kind.fix) is (outcome == "unreachable")
    assert only(CHECK, shut_out(made, "nd1"), found.code, hosts=["nd1"]).level is Severity.WARN
    one_each = make_cluster(nproc=1, check="own_address", by_host=by_host)
    assert only(CHECK, one_each, found.code, hosts=["nd1"]).level is Severity.WARN


@pytest.mark.parametrize(("odd", "level"), [("nd0", Severity.FAIL), ("nd1", Severity.WARN)])
def test_the_agent_that_serves_the_store_of_the_ranks_calls_itself(
    odd: str, level: Severity
) -> None:
    """Found in the lab: torchrun --rdzv-backend=c10d hung there, with one rank on each host."""
    fine, bad = seen("connected"), seen("dropped", "dropped")
    by_host = {name: bad if name == odd else fine for name in ("nd0", "nd1")}
    made = make_cluster(nproc=1, check="own_address", by_host=by_host)
    named = {name: {"name": name, "first": "nd0", "answers": []} for name in ("nd0", "nd1")}
    found = only(
        CHECK, with_round(made, AGENT_NAMES, NAMES, named), "own-address-blocked", hosts=[odd]
    )
    assert found.level is level
    assert ("torchrun would hang" in found.kind.why) is (level is Severity.FAIL)


def test_a_loopback_interface_that_is_down_is_the_cause() -> None:
    by_host = {"nd0": seen("connected"), "nd1": {**seen("dropped", "dropped"), "loops": False}}
    made = make_cluster(check="own_address", by_host=by_host)
    found = only(CHECK, made, "own-address-blocked", hosts=["nd1"])
    assert found.message.endswith("; the loopback interface lo is down")
    assert [step.command for step in found.kind.fix.steps] == ["ip link set lo up"]


@each_row(
    "tool, table, chain, incoming, command",
    [
        ("nft", "inet fault", "input", True, "nft insert rule inet fault input iif lo accept"),
        ("nft", "inet fault", "out", False, "nft insert rule inet fault out oif lo accept"),
        ("nft", "ip filter", "INPUT", True, "iptables -I INPUT -i lo -j ACCEPT"),
        ("iptables", "raw", "OUTPUT", False, "iptables -t raw -I OUTPUT -o lo -j ACCEPT"),
    ],
)
def test_the_rule_that_stops_it_is_named_with_the_real_chain(
    tool: str, table: str, chain: str, incoming: bool, command: str
) -> None:
    hit = {
        "tool": tool,
        "table": table,
        "chain": chain,
        "rule": "policy drop",
        "handle": "",
        "verdict": "drop",
        "sure": True,
        "incoming": incoming,
        "packet": "first",
    }
    bad = {**seen("dropped", "dropped"), "loops": True, "rules": {"hits": [hit]}}
    made = make_cluster(check="own_address", by_host={"nd0": seen("connected"), "nd1": bad})
    found = only(CHECK, made, "own-address-blocked", hosts=["nd1"])
    assert found.message.endswith(f"; dropped by this rule: {tool} {table} {chain}: policy drop")
    assert [step.command for step in found.fix.steps] == [command]


def test_this_host_reaches_itself() -> None:
    try:
        found = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env={}))))
    except Skip as reason:
        pytest.skip(str(reason))
    assert [call["outcome"] for call in found["calls"]] == ["connected"]
