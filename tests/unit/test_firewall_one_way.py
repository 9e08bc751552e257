"""Directions that are shut, and in which gloo does not connect: the job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.peers.matrix import gloo_calls
from tests.support.peers import DROPPED, OK, REFUSED, SILENT_PROXY, Link, World
from tests.support.rows import each_row

FAIL, WARN = Severity.FAIL, Severity.WARN
UP, DOWN = ("nd0", "nd1"), ("nd1", "nd0")
"""nd1 has the greater address: gloo calls from there."""


@each_row(
    "own, other, calls",
    [
        ("192.168.77.2", "192.168.77.1", True),
        ("192.168.77.1", "192.168.77.2", False),
        ("192.168.77.9", "192.168.77.10", False),
        ("9.0.0.1", "10.0.0.1", False),
        ("192.168.0.1", "10.0.0.255", True),
        ("fe80::2%eth0", "fe80::1%eth1", True),
        ("fd00::9", "fd00::10", False),
        ("10.0.0.1", "fd00::1", None),
        ("10.0.0.1", "10.0.0.1", None),
        ("nd0", "10.0.0.1", None),
        ("", "10.0.0.1", None),
    ],
)
def test_the_greater_address_calls(own: str, other: str, calls: bool | None) -> None:
    assert gloo_calls(own, other) is calls


@each_row(
    "backend, link, attempt, code, level",
    [
        ("gloo", UP, DROPPED, "peer-one-way", WARN),
        ("gloo", UP, REFUSED, "peer-one-way", WARN),
        ("gloo", UP, SILENT_PROXY, "peer-intercepted", WARN),
        ("gloo", DOWN, DROPPED, "peer-one-way", FAIL),
        ("gloo", DOWN, SILENT_PROXY, "peer-intercepted", FAIL),
        ("nccl", UP, DROPPED, "peer-one-way", FAIL),
        ("nccl", UP, SILENT_PROXY, "peer-intercepted", FAIL),
        ("cpu:gloo,cuda:nccl", UP, DROPPED, "peer-one-way", FAIL),
    ],
)
def test_a_direction_is_a_failure_where_the_job_takes_it(
    backend: str, link: Link, attempt: Mapping[str, Any], code: str, level: Severity
) -> None:
    (found,) = World(2, backend).fail([link], attempt).judge()
    assert (found.code, found.level) == (code, level)
    assert (found.where.hosts, found.where.links) == ((), (link,))
    assert ("gloo connects these hosts from the other side" in found.message) is (level is WARN)


@each_row("shut, level", [("nd0", FAIL), ("nd1", FAIL), ("nd2", WARN)])
def test_a_host_that_nobody_reaches_stops_gloo_unless_it_calls_all(
    shut: str, level: Severity
) -> None:
    world = World(3, "gloo")
    (found,) = world.fail([(a, shut) for a in world.names if a != shut], DROPPED).judge()
    assert (found.code, found.level, found.where.hosts) == ("peer-one-way", level, (shut,))


def test_both_directions_shut_stop_gloo() -> None:
    (found,) = World(2, "gloo").fail([UP, DOWN], DROPPED).judge()
    assert (found.code, found.level) == ("peer-blocked", FAIL)


def test_an_address_of_another_family_leaves_it_a_failure() -> None:
    world = World(2, "gloo").fail([UP], DROPPED)
    (back,) = world.facts["nd1"]["peers"][str(world.seat("nd0"))]
    back["address"] = "fd00::1"
    (found,) = world.judge()
    assert (found.code, found.level) == ("peer-one-way", FAIL)


def test_a_chosen_address_that_gloo_does_not_call_is_a_warning() -> None:
    world = World(2, "gloo").extra("nd0", "nd1", "eth0", OK, "nccl-bootstrap").fail([UP], DROPPED)
    world.facts["nd0"]["peers"][str(world.seat("nd1"))][1]["attempts"] = [OK]
    (found,) = world.judge()
    assert (found.code, found.level) == ("interface-unroutable", WARN)


@each_row(
    "backend, link, stood, level",
    [  # two ranks on each host: four pairs in each of two groups
        ("gloo", DOWN, 7, FAIL),
        ("gloo", DOWN, 8, WARN),
        ("gloo", UP, 0, WARN),
        ("nccl", DOWN, 8, FAIL),
    ],
)
def test_few_connections_are_enough_for_gloo_where_it_makes_no_more(
    backend: str, link: Link, stood: int, level: Severity
) -> None:
    (found,) = World(2, backend).fail([link], {**OK, "wanted": 16, "stood": stood}).judge()
    assert (found.code, found.level, found.where.links) == ("peer-blocked", level, (link,))
