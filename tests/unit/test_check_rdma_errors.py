"""Error counters of made-up hosts, read twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Severity, Skip, Untested
from nccl_doctor.checks.fabric_ports import FabricPorts
from nccl_doctor.checks.rdma_errors import RdmaErrors
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = RdmaErrors()
COUNTER = "sys/class/infiniband/mlx5_1/ports/1/counters/symbol_error"


def early(root: Path, **env: str) -> dict[str, Any]:
    return observe(FabricPorts, env, backend="nccl", root=root)


def late(root: Path, **params: Any) -> dict[str, Any]:
    return observe(RdmaErrors, backend="nccl", params=params, root=root)


def cluster(*hosts: tuple[dict[str, Any] | None, dict[str, Any]]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    made = make_cluster(names, nproc=1, backend="nccl")
    ranks = []
    for rank, (first, second) in zip(made.ranks, hosts, strict=True):
        facts = {"rdma_errors": {"late": outcome(second)}}
        if first is not None:
            facts["fabric_ports"] = {ALONE: outcome(first)}
        ranks.append(replace(rank, facts=facts))
    return replace(made, ranks=tuple(ranks))


def test_counters_that_stand_still_are_fine_whatever_they_stand_at(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    seen = (early(tmp_path), late(tmp_path))
    assert judge(CHECK, cluster(seen, seen)) == []


def test_a_counter_that_moves_during_the_run(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    before = early(tmp_path)
    still = late(tmp_path)
    fabrics.write(tmp_path, COUNTER, "19")
    sick = (before, late(tmp_path))
    found = only(
        CHECK,
        cluster((before, still), sick, (before, still)),
        "rdma-errors-rising",
        hosts=["nd1"],
        interfaces=["mlx5_1:1"],
    )
    assert found.level is Severity.WARN
    assert "symbol_error +12" in found.message


@pytest.mark.parametrize(
    ("counter", "most"),
    [("symbol_error", 65535), ("link_downed", 255), ("local_link_integrity_errors", 15)],
)
def test_a_counter_that_can_count_no_further_says_so(
    tmp_path: Path, counter: str, most: int
) -> None:
    fabrics.connectx7(tmp_path)
    healthy = (early(tmp_path), late(tmp_path))
    folder = "sys/class/infiniband/mlx5_1/ports/1/counters"
    fabrics.write(tmp_path, f"{folder}/{counter}", f"{most}")
    full = (early(tmp_path), late(tmp_path))
    found = only(
        CHECK,
        cluster(healthy, full),
        "rdma-counter-full",
        hosts=["nd1"],
        interfaces=["mlx5_1:1"],
    )
    assert found.level is Severity.INFO
    assert found.message == f"mlx5_1:1: {counter} at {most}"
    assert "perfquery -C mlx5_1 -P 1 -R" in found.fix
    fabrics.write(tmp_path, f"{folder}/{counter}", f"{most - 1}")
    reset = (early(tmp_path), late(tmp_path))
    assert judge(CHECK, cluster(reset)) == []


def test_a_counter_that_fills_up_meanwhile_has_risen(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    before = early(tmp_path)
    fabrics.write(tmp_path, COUNTER, "65535")
    only(
        CHECK,
        cluster((before, late(tmp_path))),
        "rdma-errors-rising",
        hosts=["nd0"],
        interfaces=["mlx5_1:1"],
    )


def test_a_wider_counter_is_never_full(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    fabrics.write(tmp_path, COUNTER, "65536")
    other = "sys/class/infiniband/mlx5_0/ports/1/hw_counters/local_ack_timeout_err"
    fabrics.write(tmp_path, other, "65535")
    assert judge(CHECK, cluster((early(tmp_path), late(tmp_path)))) == []


@pytest.mark.parametrize(
    "counter",
    [
        "sys/class/infiniband/mlx5_1/ports/1/hw_counters/rx_icrc_encapsulated",
        "sys/class/net/eth_mlx5_1/statistics/rx_crc_errors",
    ],
)
def test_frames_of_roce_that_arrive_changed(tmp_path: Path, counter: str) -> None:
    fabrics.roce(tmp_path)
    fabrics.write(tmp_path, counter, "3")
    before = early(tmp_path)
    fabrics.write(tmp_path, "sys/class/net/eth_mlx5_0/statistics/rx_errors", "9")  # too long ones
    fabrics.write(tmp_path, counter, "5")
    found = only(
        CHECK,
        cluster((before, late(tmp_path))),
        "rdma-errors-rising",
        hosts=["nd0"],
        interfaces=["mlx5_1:1"],
    )
    assert f"{counter.rpartition('/')[2]} +2" in found.message


def test_a_port_that_nccl_does_not_use_may_have_errors(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    before = early(tmp_path, NCCL_IB_HCA="^mlx5_1")
    fabrics.write(tmp_path, COUNTER, "19")
    assert judge(CHECK, cluster((before, late(tmp_path)))) == []


def test_without_a_first_reading_it_reads_twice(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path)
    seen = late(tmp_path, pause_s=0.01)
    assert seen["before"] == seen["counters"]
    assert judge(CHECK, cluster((None, seen))) == []
    seen["counters"]["mlx5_0:1"]["link_downed"] += 1
    only(CHECK, cluster((None, seen)), "rdma-errors-rising", hosts=["nd0"], interfaces=["mlx5_0:1"])


def test_every_host_reads_by_itself_and_pauses_only_where_it_must(tmp_path: Path) -> None:
    made = make_cluster(["nd0", "nd1"], nproc=2, backend="nccl")
    (plan,) = CHECK.plan(made)
    assert (plan.groups, plan.params["pause_s"]) == (((0,), (2,)), 2.0)
    fabrics.connectx7(tmp_path)
    (plan,) = CHECK.plan(cluster((early(tmp_path), {}), (early(tmp_path), {})))
    assert plan.params["pause_s"] == 0.0
    assert CHECK.plan(make_cluster(["nd0"], absent_nodes=[0], backend="nccl")) == ()


def test_hosts_without_devices_or_counters_are_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no RDMA device here"):
        late(tmp_path)
    with pytest.raises(Untested, match="no error counter"):
        late(fabrics.efa(tmp_path))
    with pytest.raises(Skip, match="does not use NCCL"):
        CHECK.plan(make_cluster(backend="gloo"))


def test_counters_of_efa(tmp_path: Path) -> None:
    fabrics.efa(tmp_path, 2)
    folder = "sys/class/infiniband/rdmap1s0/ports/1/hw_counters"
    for name in ("unresponsive_remote_events", "retrans_pkts"):
        fabrics.write(tmp_path, f"{folder}/{name}", "3")
    before = early(tmp_path)
    for name in ("unresponsive_remote_events", "retrans_pkts"):
        fabrics.write(tmp_path, f"{folder}/{name}", "5")
    found = only(
        CHECK,
        cluster((before, late(tmp_path))),
        "rdma-errors-rising",
        hosts=["nd0"],
        interfaces=["rdmap1s0:1"],
    )
    assert "unresponsive_remote_events +2" in found.message
    assert "retrans_pkts" not in found.message  # rises in congestion too
