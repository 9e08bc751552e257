"""Check rdma: ports that are down or wait for a subnet manager, and EFA that reaches nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Outcome, OutcomeStatus, Severity
from tests.support.findings import judge, only
from tests.unit.test_check_rdma import CHECK, HEALTHY, cluster, host, port

REFUSED = "NET/OFI CM: Unable to insert remote address into address vector for device. RC: Invalid"


@pytest.mark.parametrize(
    ("hosts", "sick"),
    [
        ("good bad", ["nd1"]),
        ("bad good", ["nd0"]),
        ("good bad good bad", ["nd1", "nd3"]),
    ],
)
@pytest.mark.parametrize("told", [{}, {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}])
def test_of_as_many_hosts_with_a_port_up_as_down_those_with_it_down_are_named(
    hosts: str, sick: list[str], told: dict[str, str]
) -> None:
    by_name = {
        "good": host(port(), port("mlx5_1"), **told),
        "bad": host(port(), port("mlx5_1", "DOWN"), **told),
    }
    found = judge(CHECK, cluster(*[by_name[name] for name in hosts.split()]))
    assert {f.code for f in found} == {"rdma-port-down"}
    assert [f.where.hosts[0] for f in found] == sick
    assert {f.where.interfaces for f in found} == {("mlx5_1:1",)}
    assert {(f.level, f.confidence) for f in found} == {(Severity.WARN, Confidence.POSSIBLE)}


class TestUnconfigured:
    """Ports that have a link, and that no subnet manager has made active."""

    @staticmethod
    def waits(device: str = "mlx5_0", state: str = "INIT", **more: Any) -> dict[str, Any]:
        return port(device, state, **{"physical": "LinkUp", **more})

    def test_no_subnet_manager_anywhere(self) -> None:
        bad = host(self.waits(), self.waits("mlx5_1", "ARMED"), road="sockets")
        for hosts in ([bad], [bad, bad]):
            found = judge(CHECK, cluster(*hosts))
            assert [f.code for f in found] == ["rdma-port-unconfigured"] * len(hosts)
            assert {f.where.interfaces for f in found} == {("mlx5_0:1", "mlx5_1:1")}
            assert {f.level for f in found} == {Severity.WARN}
            assert "mlx5_0:1 INIT, mlx5_1:1 ARMED" in found[0].message
            assert all(word in found[0].kind.fix for word in ("opensm", "ibstat", "sminfo"))

    def test_one_rail_of_all_hosts_has_none(self) -> None:
        bad = host(port(), self.waits("mlx5_1"))
        found = judge(CHECK, cluster(bad, bad, bad))
        assert {(f.code, f.where.interfaces) for f in found} == {
            ("rdma-port-unconfigured", ("mlx5_1:1",))
        }

    def test_on_one_host_alone_it_is_no_bad_cable(self) -> None:
        found = only(
            CHECK,
            cluster(HEALTHY, host(port(), self.waits("mlx5_1")), HEALTHY),
            "rdma-port-unconfigured",
            hosts=["nd1"],
            interfaces=["mlx5_1:1"],
        )
        assert found.level is Severity.WARN
        assert "ACTIVE on other hosts" in found.message

    def test_a_host_that_has_no_other_port_goes_another_way(self) -> None:
        bad = host(self.waits(), road="sockets")
        made = cluster(HEALTHY, bad, HEALTHY)
        found = only(CHECK, made, "rdma-port-unconfigured", hosts=["nd1"], interfaces=["mlx5_0:1"])
        assert found.level is Severity.FAIL
        assert {f.code: f.explained_by for f in judge(CHECK, made)} == {
            "rdma-port-unconfigured": None,
            "rdma-mixed": "rdma-port-unconfigured",
        }

    def test_where_nccl_may_take_nothing_else_it_ends(self) -> None:
        bad = host(self.waits(), road="none", NCCL_NET="IB")
        found = judge(CHECK, cluster({**bad, "reason": "NCCL_NET=IB"}))
        assert [(f.code, f.level) for f in found] == [("rdma-port-unconfigured", Severity.FAIL)]

    @pytest.mark.parametrize(
        "ports",
        [
            {"physical": "Polling"},  # no link
            {"physical": ""},  # who knows
            {"link": "Ethernet"},  # needs none
            {"wanted": False},
            {"state": "DOWN"},
        ],
    )
    def test_what_is_something_else(self, ports: dict[str, Any]) -> None:
        one = host(port(), {**self.waits("mlx5_1"), **ports})
        assert judge(CHECK, cluster(one, one)) == []

    @pytest.mark.parametrize("told", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}])
    def test_nobody_asks_where_rdma_is_off(self, told: dict[str, str]) -> None:
        assert judge(CHECK, cluster(host(self.waits(), road="sockets", **told))) == []

    def test_a_plug_in_has_rules_of_its_own(self) -> None:
        assert judge(CHECK, cluster(host(self.waits(), road="plugin", NCCL_NET="Other"))) == []


@pytest.mark.parametrize(
    ("ending", "is_efa"),
    [
        (Outcome(OutcomeStatus.RAISED, reason=f"ncclInternalError: {REFUSED}"), True),
        (Outcome(OutcomeStatus.RAISED, reason="ncclSystemError", log_tail=f"WARN {REFUSED}"), True),
        (Outcome(OutcomeStatus.RAISED, reason="ncclInvalidUsage"), False),
        (Outcome(OutcomeStatus.SKIPPED, reason=REFUSED), False),
    ],
)
def test_a_security_group_may_show_as_an_error(ending: Outcome, is_efa: bool) -> None:
    def ended(one: dict[str, Any]) -> Cluster:
        made = cluster(one, one)
        first = replace(made.ranks[0], facts={"collectives": {"world": ending}})
        return replace(made, ranks=(first, *made.ranks[1:]))

    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    found = judge(CHECK, ended(have))
    assert [f.code for f in found] == ["efa-maybe-blocked"] * is_efa
    for one in found:
        assert one.where.hosts == ("nd0", "nd1")
        assert "could not reach the EFA device of another rank" in one.message
        assert "availability zone" in one.kind.fix
    assert judge(CHECK, ended(host(road="sockets"))) == []
