"""Partition keys of made-up hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Severity, Skip, Untested
from nccl_doctor.checks.partition_keys import PartitionKeys
from tests.support import fabrics
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = PartitionKeys()
DEFAULT, JOB, OTHER, LIMITED = "0xffff", "0x8012", "0x8013", "0x0012"
NONE = "0x0000"


def host(root: Path, *keys: Sequence[str], layer: str = "InfiniBand", **env: str) -> dict[str, Any]:
    """A host with one port for each table of keys."""
    for number, table in enumerate(keys):
        name = f"mlx5_{number}"
        fabrics.add_device(root, name, layer=layer, pci=f"0000:{0x1A + number:x}:00.0")
        for index, key in enumerate(table):
            fabrics.write(root, f"sys/class/infiniband/{name}/ports/1/pkeys/{index}", key)
    return observe(PartitionKeys, env, backend="nccl", root=root)


def cluster(*hosts: dict[str, Any]) -> Cluster:
    seen = {f"nd{i}": facts for i, facts in enumerate(hosts)}
    return make_cluster(list(seen), 1, check="partition_keys", by_host=seen, backend="nccl")


class TestHealthy:
    def test_the_default_partition(self, tmp_path: Path) -> None:
        same = host(tmp_path, [DEFAULT, NONE], [DEFAULT, NONE])
        assert same["ports"][0] == {"name": "mlx5_0:1", "key": 0xFFFF, "others": {}}
        assert judge(CHECK, cluster(same, same, same)) == []

    def test_one_partition_at_another_index(self, tmp_path: Path) -> None:
        """Each host has its own setting, as in its own /etc/nccl.conf."""
        one = host(tmp_path / "a", [DEFAULT, JOB], NCCL_IB_PKEY="1")
        other = host(tmp_path / "b", [JOB, DEFAULT])
        assert judge(CHECK, cluster(one, one, other)) == []

    def test_a_partition_for_each_rail(self, tmp_path: Path) -> None:
        same = host(tmp_path, [JOB], [OTHER])
        assert judge(CHECK, cluster(same, same)) == []

    def test_one_limited_member_reaches_full_ones(self, tmp_path: Path) -> None:
        full, limited = host(tmp_path / "a", [JOB]), host(tmp_path / "b", [LIMITED])
        assert judge(CHECK, cluster(full, limited, full)) == []

    def test_one_host_alone_needs_no_network(self, tmp_path: Path) -> None:
        assert judge(CHECK, cluster(host(tmp_path, [NONE]))) == []

    def test_roce_has_no_partitions_to_choose(self, tmp_path: Path) -> None:
        with pytest.raises(Skip, match="shows its partition keys"):
            host(tmp_path, [NONE], layer="Ethernet")

    def test_tables_that_a_container_does_not_show(self, tmp_path: Path) -> None:
        with pytest.raises(Skip):
            host(tmp_path / "a", [])
        with pytest.raises(Skip):
            host(tmp_path / "b", [""])

    def test_ports_that_nccl_does_not_use(self, tmp_path: Path) -> None:
        """Storage is in a partition of its own."""
        hosts = [
            host(tmp_path / name, [JOB], [store], NCCL_IB_HCA="=mlx5_0")
            for name, store in (("a", OTHER), ("b", NONE))
        ]
        assert judge(CHECK, cluster(*hosts)) == []

    def test_a_key_by_its_value(self, tmp_path: Path) -> None:
        with pytest.raises(Untested, match="NCCL_IB_PKEY_VALUE"):
            host(tmp_path, [JOB], NCCL_IB_PKEY_VALUE="0x8012")

    def test_sockets(self, tmp_path: Path) -> None:
        with pytest.raises(Skip):
            host(tmp_path, [JOB], NCCL_IB_DISABLE="1")


class TestEmpty:
    @pytest.mark.parametrize("table", [[DEFAULT, NONE], [DEFAULT]])
    def test_an_index_without_a_key(self, tmp_path: Path, table: list[str]) -> None:
        good = host(tmp_path / "a", [DEFAULT, JOB], NCCL_IB_PKEY="1")
        bad = host(tmp_path / "b", table, NCCL_IB_PKEY="1")
        found = only(
            CHECK,
            cluster(good, bad, good),
            "pkey-index-empty",
            hosts=["nd1"],
            interfaces=["mlx5_0:1"],
        )
        assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
        assert found.message == (
            "NCCL_IB_PKEY=1: mlx5_0:1 has no key at index 1; other keys: 0: 0xffff"
        )

    def test_no_setting(self, tmp_path: Path) -> None:
        good, bad = host(tmp_path / "a", [DEFAULT]), host(tmp_path / "b", [NONE])
        found = only(
            CHECK, cluster(good, bad), "pkey-index-empty", hosts=["nd1"], interfaces=["mlx5_0:1"]
        )
        assert found.confidence is Confidence.LIKELY

    def test_an_index_on_roce(self, tmp_path: Path) -> None:
        bad = host(tmp_path, [DEFAULT], layer="Ethernet", NCCL_IB_PKEY="3")
        found = judge(CHECK, cluster(bad, bad))
        assert [(f.code, f.where.hosts) for f in found] == [
            ("pkey-index-empty", ("nd0",)),
            ("pkey-index-empty", ("nd1",)),
        ]


class TestDiffers:
    def test_one_index_is_another_partition_on_one_host(self, tmp_path: Path) -> None:
        good = host(tmp_path / "a", [DEFAULT, JOB], NCCL_IB_PKEY="1")
        bad = host(tmp_path / "b", [DEFAULT, OTHER, JOB], NCCL_IB_PKEY="1")
        found = only(
            CHECK, cluster(good, good, bad), "pkey-differs", hosts=["nd2"], interfaces=["mlx5_0:1"]
        )
        assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
        assert found.message == (
            "mlx5_0:1 0x8013 at index 1; the other hosts: 0x8012; here that partition is at index 2"
        )
        assert found.fix == "export NCCL_IB_PKEY=2"

    def test_of_two_hosts_nobody_can_tell(self, tmp_path: Path) -> None:
        found = judge(CHECK, cluster(host(tmp_path / "a", [JOB]), host(tmp_path / "b", [OTHER])))
        assert [f.code for f in found] == ["pkey-differs"] * 2
        assert {f.confidence for f in found} == {Confidence.POSSIBLE}


class TestLimited:
    def test_every_host_is_a_limited_member(self, tmp_path: Path) -> None:
        same = host(tmp_path, ["0x7fff"])
        found = only(
            CHECK,
            cluster(same, same),
            "pkey-limited",
            hosts=["nd0", "nd1"],
            interfaces=["mlx5_0:1"],
        )
        assert found.level is Severity.FAIL
        assert found.message == "0x7fff: limited members on 2 of 2 hosts"

    def test_a_partition_of_the_job_beside_it(self, tmp_path: Path) -> None:
        """As where the default partition is for management."""
        same = host(tmp_path, ["0x7fff", JOB], ["0x7fff", JOB, OTHER])
        found = only(
            CHECK,
            cluster(same, same),
            "pkey-limited",
            hosts=["nd0", "nd1"],
            interfaces=["mlx5_0:1", "mlx5_1:1"],
        )
        assert found.fix.startswith("on every host: export NCCL_IB_PKEY=1 (there all are full")

    def test_full_members_are_not_blamed(self, tmp_path: Path) -> None:
        full, limited = host(tmp_path / "a", [JOB]), host(tmp_path / "b", [LIMITED])
        only(
            CHECK,
            cluster(limited, full, limited),
            "pkey-limited",
            hosts=["nd0", "nd2"],
            interfaces=["mlx5_0:1"],
        )
