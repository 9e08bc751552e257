"""Proposals for one setting of a host: of two, a report prints one or none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import Fix, Kind, Layer, On, Severity, Step, Where, shell
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.one_value import settings_of
from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.fixes import export
from nccl_doctor.report.formats import json as json_format
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, two_values
from tests.support.rows import each_row

FIRST = "do first what is said for a, which sets "


def of(code: str, *ways: Fix, hosts: Iterable[str] = ("nd0",), **more: Any) -> Finding:
    """A failure with these ways to mend it."""
    first, *others = ways
    fix = Fix(*first.steps, alternatives=others)
    kind = Kind(code, Layer.ENV, title=code, why="it stops the job", fix="mend it")
    return Finding(kind, "it is wrong", Where(hosts=tuple(hosts)), fix=fix, **more)


def does(command: Command, on: On | tuple[str, ...] = On.HERE) -> Fix:
    return Fix(Step(command, on))


def told(*findings: Finding) -> Mapping[str, str]:
    """Code → fix in a report; what its JSON proposes has one value for each setting."""
    report = conclude(make_cluster(("nd0", "nd1")), [], run=RUN, problems=findings)
    assert two_values(json.loads(json_format.render(report))) == []
    return {each.code: each.fix for each in report.findings}


ETH0, ETH1 = (Fix(export(GLOO_SOCKET_IFNAME=each)) for each in ("eth0", "eth1"))


@each_row(("one", "other", "name"), [
    (ETH0, ETH1, "GLOO_SOCKET_IFNAME"),
    (ETH0, does(shell("unset GLOO_SOCKET_IFNAME")), "GLOO_SOCKET_IFNAME"),
    (does(shell("sysctl -w net/core/somaxconn=9")), does(shell("sysctl -w net.core.somaxconn=8")),
     "net.core.somaxconn"),
    (does(shell("# --master-addr nd0")), does(shell("# --master-addr nd1")), "--master-addr"),
    (does(shell("ip link set dev eth0 mtu 1500")), does(shell("ip link set dev eth0 mtu 1400")),
     "the MTU of eth0"),
])  # fmt: skip
def test_the_second_of_two_values_is_left_out(one: Fix, other: Fix, name: str) -> None:
    assert told(of("a", one), of("b", other)) == {"a": one, "b": FIRST + name}


def test_the_same_value_and_the_same_setting_of_another_host_stay() -> None:
    here, there = (
        does(ETH.steps[0].command, (host,)) for ETH, host in ((ETH0, "nd0"), (ETH1, "nd1"))
    )
    assert told(of("a", ETH0), of("b", ETH0)) == {"a": ETH0, "b": ETH0}
    assert told(of("a", here), of("b", there)) == {"a": here, "b": there}
    assert told(of("a", there), of("b", ETH0)) == {"a": there, "b": FIRST + "GLOO_SOCKET_IFNAME"}


def test_another_way_that_agrees_takes_the_place_of_the_first() -> None:
    plug = Fix(text="check the cable")
    fixes = told(of("a", ETH0), of("b", ETH1, plug), of("c", plug, ETH1, ETH0))
    assert fixes["b"] == "check the cable"
    assert fixes["c"].alternatives == (ETH0,)


def test_a_failure_decides_before_a_warning_and_a_cause_before_what_it_explains() -> None:
    warned = of("a", ETH0, severity=Severity.WARN)
    assert told(warned, of("b", ETH1))["b"] == ETH1
    explained = of("a", ETH0, explained_by="b")
    assert told(explained, of("b", ETH1))["b"] == ETH1


@each_row(("command", "settings"), [
    ("export A=1 B='=x y'", {"A": "1", "B": "=x y"}),
    ("export PATH", {}),
    ("unset A B", {"A": "", "B": ""}),
    ("# export A=NIC", {}),
    ("# --nnodes 2", {"--nnodes": "2"}),
    ("# --master-addr ADDRESS", {}),
    ('sysctl -w a.b="1 2" c=3', {"a.b": "1 2", "c": "3"}),
    ("ip link set dev eth0 up", {}),
    ("export A='", {}),
    ("", {}),
])  # fmt: skip
def test_what_a_command_sets(command: str, settings: Mapping[str, str]) -> None:
    assert settings_of(command) == settings
