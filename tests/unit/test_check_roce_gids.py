"""GID tables of made-up hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.roce_gids import RoceGids
from tests import fabrics
from tests.clusters import make_cluster, outcome
from tests.findings import judge, only

CHECK = RoceGids()
LOCAL_ONLY = {0: (fabrics.LOCAL, "IB/RoCE v1"), 1: (fabrics.LOCAL, "RoCE v2")}
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0002"


def look(root: Path, **env: str) -> dict[str, Any]:
    class Here(RoceGids):
        pass

    Here.root = root
    found = Here().observe(Context(launch=Launch(), env=env, backend="nccl"))
    return dict(json.loads(json.dumps(found)))


def host(root: Path, gids: dict[int, tuple[str, str]] | None = None, **env: str) -> dict[str, Any]:
    table = fabrics.roce_gids() if gids is None else gids
    fabrics.add_device(root, "mlx5_0", layer="Ethernet", gids=table)
    return look(root, **env)


def cluster(*hosts: dict[str, Any], nccl: str = "") -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    made = make_cluster(names, nproc=1, check="roce_gids", by_host=seen, backend="nccl")
    if nccl:
        facts = {"backend_device": {ALONE: outcome({"nccl": nccl})}}
        made = replace(made, ranks=tuple(replace(rank, facts=facts) for rank in made.ranks))
    return made


def test_hosts_with_the_same_gids_are_fine(tmp_path: Path) -> None:
    good = look(fabrics.roce(tmp_path))
    assert judge(CHECK, cluster(good, good, nccl="2.28.9")) == []
    assert good["picks"]["rows"][0] == ["mlx5_0:1", 3, "RoCE v2 over IPv4", "10.0.0.1"]


def test_infiniband_and_efa_have_no_gid_to_choose(tmp_path: Path) -> None:
    for tree in (fabrics.connectx7, fabrics.efa):
        with pytest.raises(Skip, match="no active RoCE port"):
            look(tree(tmp_path / tree.__name__))
    with pytest.raises(Skip, match="no active RoCE port"):
        look(tmp_path / "none")
    with pytest.raises(Skip, match="no active RoCE port"):
        look(fabrics.roce(tmp_path / "roce"), NCCL_IB_HCA="mlx4")


def test_an_index_that_points_at_nothing(tmp_path: Path) -> None:
    good = host(tmp_path / "a", NCCL_IB_GID_INDEX="3")
    bad = host(tmp_path / "b", LOCAL_ONLY, NCCL_IB_GID_INDEX="3")
    found = only(
        CHECK,
        cluster(good, bad, good),
        "roce-gid-index-empty",
        hosts=["nd1"],
        interfaces=["mlx5_0:1"],
    )
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert "entry 3 of mlx5_0:1 is empty; entries with RoCE v2 over IPv4: none" in found.message


def test_an_index_beyond_the_table(tmp_path: Path) -> None:
    bad = host(tmp_path, NCCL_IB_GID_INDEX="17")
    found = judge(CHECK, cluster(bad, bad))
    assert [f.code for f in found] == ["roce-gid-index-empty"] * 2
    assert "entries with RoCE v2 over IPv4: 3" in found[0].message


def test_one_host_has_no_ipv4_gid(tmp_path: Path) -> None:
    good, bad = host(tmp_path / "a"), host(tmp_path / "b", LOCAL_ONLY)
    found = only(
        CHECK, cluster(good, bad, good), "roce-gid-missing", hosts=["nd1"], interfaces=["mlx5_0:1"]
    )
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)


def test_one_index_is_another_kind_on_one_host(tmp_path: Path) -> None:
    good = host(tmp_path / "a", NCCL_IB_GID_INDEX="3")
    shifted = {1: (MAPPED, "RoCE v2"), 3: (MAPPED, "IB/RoCE v1")}
    bad = host(tmp_path / "b", shifted, NCCL_IB_GID_INDEX="3")
    found = only(
        CHECK, cluster(good, good, bad), "roce-gid-differs", hosts=["nd2"], interfaces=["mlx5_0:1"]
    )
    assert found.level is Severity.FAIL
    assert "index 3 RoCE v1 over IPv4; the other hosts: RoCE v2 over IPv4" in found.message


def test_of_two_hosts_nobody_can_tell_which_one_is_odd(tmp_path: Path) -> None:
    found = judge(
        CHECK,
        cluster(host(tmp_path / "a"), host(tmp_path / "b", NCCL_IB_GID_INDEX="1")),
    )
    assert [f.code for f in found] == ["roce-gid-differs"] * 2
    assert {f.confidence for f in found} == {Confidence.POSSIBLE}
    assert {f.where.hosts for f in found} == {("nd0",), ("nd1",)}


def test_no_host_has_an_ipv4_gid(tmp_path: Path) -> None:
    same = host(tmp_path, LOCAL_ONLY)
    found = judge(CHECK, cluster(same, same))
    assert [f.code for f in found] == ["roce-gid-missing"] * 2
    assert {f.level for f in found} == {Severity.WARN}


def test_an_old_nccl_does_not_look_for_the_gid(tmp_path: Path) -> None:
    same = host(tmp_path)
    found = judge(CHECK, cluster(same, same, nccl="2.20.5"))
    assert [f.code for f in found] == ["roce-gid-missing"] * 2
    assert "NCCL 2.20.5 takes index 0" in found[0].message
    told = host(tmp_path / "b", NCCL_IB_GID_INDEX="3")
    assert judge(CHECK, cluster(told, told, nccl="2.20.5")) == []


def test_the_right_kind_at_another_index_is_only_mentioned(tmp_path: Path) -> None:
    usual = host(tmp_path / "a")
    other = host(tmp_path / "b", {0: (fabrics.LOCAL, "IB/RoCE v1"), 1: (MAPPED, "RoCE v2")})
    found = only(CHECK, cluster(usual, other, usual), "roce-gid-differs", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert "at indices 1, 3" in found.message


def test_an_empty_table_and_no_index(tmp_path: Path) -> None:
    empty = host(tmp_path / "a", {})
    good = host(tmp_path / "b")
    only(
        CHECK,
        cluster(good, empty, good),
        "roce-gid-missing",
        hosts=["nd1"],
        interfaces=["mlx5_0:1"],
    )
