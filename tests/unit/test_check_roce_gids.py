"""GID tables of made-up hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.roce_gids import RoceGids
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = RoceGids()
LOCAL_ONLY = {0: (fabrics.LOCAL, "IB/RoCE v1"), 1: (fabrics.LOCAL, "RoCE v2")}
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0002"


def look(root: Path, **env: str) -> dict[str, Any]:
    return observe(RoceGids, env, backend="nccl", root=root)


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


def test_of_two_hosts_the_one_that_has_what_nccl_looks_for_is_well(tmp_path: Path) -> None:
    found = only(
        CHECK,
        cluster(host(tmp_path / "a"), host(tmp_path / "b", NCCL_IB_GID_INDEX="1")),
        "roce-gid-differs",
        hosts=["nd1"],
        interfaces=["mlx5_0:1"],
    )
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.POSSIBLE)
    assert "the other hosts: RoCE v2 over IPv4; NCCL_IB_GID_INDEX=1" in found.message


def test_of_two_hosts_that_are_both_odd_nobody_can_tell(tmp_path: Path) -> None:
    found = judge(
        CHECK,
        cluster(
            host(tmp_path / "a", NCCL_IB_GID_INDEX="0"), host(tmp_path / "b", NCCL_IB_GID_INDEX="1")
        ),
    )
    assert [f.code for f in found] == ["roce-gid-differs"] * 2
    assert {f.confidence for f in found} == {Confidence.POSSIBLE}
    assert {f.where.hosts for f in found} == {("nd0",), ("nd1",)}


def test_two_hosts_that_want_other_kinds_are_both_named(tmp_path: Path) -> None:
    one = host(tmp_path / "a")
    other = host(tmp_path / "b", {3: (MAPPED, "IB/RoCE v1")}, NCCL_IB_ROCE_VERSION_NUM="1")
    assert other["picks"]["rows"][0][2] == "RoCE v1 over IPv4"
    found = judge(CHECK, cluster(one, other))
    assert {(f.code, f.where.hosts) for f in found} == {
        ("roce-gid-differs", ("nd0",)),
        ("roce-gid-differs", ("nd1",)),
    }


def two_ports(root: Path, second: dict[int, tuple[str, str]] | None = None) -> dict[str, Any]:
    fabrics.roce(root, 1)
    table = fabrics.roce_gids() if second is None else second
    fabrics.add_device(root, "mlx5_1", layer="Ethernet", gids=table, pci="0000:3b:00.0")
    return look(root)


def test_of_two_hosts_one_port_has_no_ipv4_gid(tmp_path: Path) -> None:
    good, bad = two_ports(tmp_path / "a"), two_ports(tmp_path / "b", LOCAL_ONLY)
    for hosts, sick in (([good, bad], "nd1"), ([bad, good], "nd0")):
        found = only(
            CHECK, cluster(*hosts), "roce-gid-missing", hosts=[sick], interfaces=["mlx5_1:1"]
        )
        assert (found.level, found.confidence) == (Severity.FAIL, Confidence.POSSIBLE)
        assert "the other hosts: RoCE v2 over IPv4" in found.message


@pytest.mark.parametrize("port", ["one", "all"])
def test_a_sound_host_is_not_to_blame_for_what_most_lack(tmp_path: Path, port: str) -> None:
    if port == "one":
        good, bad = two_ports(tmp_path / "a"), two_ports(tmp_path / "b", LOCAL_ONLY)
    else:
        good, bad = host(tmp_path / "a"), host(tmp_path / "b", LOCAL_ONLY)
    found = judge(CHECK, cluster(bad, good, bad))
    assert [(f.code, f.where.hosts) for f in found] == [
        ("roce-gid-missing", ("nd0",)),
        ("roce-gid-missing", ("nd2",)),
    ]
    assert {f.level for f in found} == {Severity.FAIL}


def test_most_hosts_may_have_chosen_another_kind(tmp_path: Path) -> None:
    chosen = host(tmp_path / "a", NCCL_IB_GID_INDEX="2")
    found = judge(CHECK, cluster(chosen, host(tmp_path / "b"), chosen))
    assert [(f.code, f.where.hosts, f.level) for f in found] == [
        ("roce-gid-differs", ("nd1",), Severity.FAIL),
        ("roce-gid-missing", ("nd0",), Severity.WARN),
        ("roce-gid-missing", ("nd2",), Severity.WARN),
    ]
    assert "the other hosts: RoCE v1 over IPv4" in found[0].message


@pytest.mark.parametrize("count", [1, 3])
def test_one_bad_port_of_several_alike_on_all_hosts(tmp_path: Path, count: int) -> None:
    bad = two_ports(tmp_path, LOCAL_ONLY)
    found = judge(CHECK, cluster(*[bad] * count))
    assert [(f.code, f.where.interfaces) for f in found] == [
        ("roce-gid-missing", ("mlx5_1:1",))
    ] * count
    assert {f.level for f in found} == {Severity.WARN}
    assert "mlx5_0:1" not in found[0].message


def test_an_empty_table_is_said_to_be_empty(tmp_path: Path) -> None:
    empty = host(tmp_path / "a", {})
    found = only(
        CHECK,
        cluster(empty, host(tmp_path / "b")),
        "roce-gid-missing",
        hosts=["nd0"],
        interfaces=["mlx5_0:1"],
    )
    assert "index 0 empty" in found.message


def test_no_host_has_an_ipv4_gid(tmp_path: Path) -> None:
    same = host(tmp_path, LOCAL_ONLY)
    found = judge(CHECK, cluster(same, same))
    assert [f.code for f in found] == ["roce-gid-missing"] * 2
    assert {f.level for f in found} == {Severity.WARN}


def test_an_old_nccl_does_not_look_for_the_gid(tmp_path: Path) -> None:
    same = host(tmp_path)
    found = judge(CHECK, cluster(same, same, nccl="2.20.5"))
    assert [f.code for f in found] == ["roce-gid-missing"] * 2
    assert "NCCL 2.20.5 uses index 0" in found[0].message
    told = host(tmp_path / "b", NCCL_IB_GID_INDEX="3")
    assert judge(CHECK, cluster(told, told, nccl="2.20.5")) == []


@pytest.mark.parametrize(("loaded", "is_old"), [("2.20.5", True), ("2.28.9", False), (None, False)])
def test_the_nccl_that_is_loaded_counts(tmp_path: Path, loaded: str | None, is_old: bool) -> None:
    same = host(tmp_path)
    made = cluster(same, same, nccl="2.27.5" if is_old else "2.20.5")
    library = {"built": "2.27.5", "loaded": loaded and {"version": loaded}}
    ranks = tuple(
        replace(rank, facts={**rank.facts, "nccl_library": {ALONE: outcome(library)}})
        for rank in made.ranks
    )
    found = judge(CHECK, replace(made, ranks=ranks))
    assert [f.code for f in found] == ["roce-gid-missing"] * (2 * is_old)
    assert all("NCCL 2.20.5 uses index 0" in f.message for f in found)


def test_the_right_kind_at_another_index_is_only_mentioned(tmp_path: Path) -> None:
    usual = host(tmp_path / "a")
    other = host(tmp_path / "b", {0: (fabrics.LOCAL, "IB/RoCE v1"), 1: (MAPPED, "RoCE v2")})
    found = only(CHECK, cluster(usual, other, usual), "roce-gid-differs", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert "at indices 1, 3" in found.message
    assert found.kind.title == "Hosts have the same kind of GID at different indices"


AUTO = ("0000:0000:0000:0000:0000:ffff:a9fe:0703", "RoCE v2")
"""169.254.7.3"""


def auto(root: Path, good: bool = False, **env: str) -> dict[str, Any]:
    """A port that has an address of its own making, and perhaps a good one after it."""
    table = {0: (fabrics.LOCAL, "IB/RoCE v1"), 1: AUTO}
    return host(root, {**table, 2: (MAPPED, "RoCE v2")} if good else table, **env)


def test_an_interface_that_got_no_address(tmp_path: Path) -> None:
    good, bad = host(tmp_path / "a"), auto(tmp_path / "b")
    assert bad["picks"]["rows"][0][1] == 1
    found = only(
        CHECK, cluster(good, bad, good), "roce-gid-missing", hosts=["nd1"], interfaces=["mlx5_0:1"]
    )
    assert found.level is Severity.FAIL
    assert "index 1 RoCE v2 over link-local IPv4; the other hosts: RoCE v2 over" in found.message


def test_nccl_takes_a_link_local_ipv4_address_before_a_good_one(tmp_path: Path) -> None:
    same = auto(tmp_path, good=True)
    assert same["picks"]["rows"][0][1:] == [1, "RoCE v2 over IPv4", "169.254.7.3"]
    found = judge(CHECK, cluster(same, same))
    assert {(f.code, f.level) for f in found} == {("roce-gid-missing", Severity.WARN)}
    assert "NCCL_IB_ADDR_RANGE=ADDRESS (the network of 10.0.0.2)" in found[0].fix


def test_an_index_that_names_a_link_local_ipv4_address(tmp_path: Path) -> None:
    bad = auto(tmp_path / "b", good=True, NCCL_IB_GID_INDEX="1")
    good = auto(tmp_path / "a", good=True, NCCL_IB_GID_INDEX="2")
    found = only(
        CHECK, cluster(good, good, bad), "roce-gid-differs", hosts=["nd2"], interfaces=["mlx5_0:1"]
    )
    assert (found.level, found.fix) == (Severity.FAIL, "")


@pytest.mark.parametrize(
    "settings",
    [
        {"NCCL_IB_ADDR_RANGE": "10.0.0.0/24"},
        {"NCCL_IB_GID_INDEX": "2"},
        {"NCCL_IB_ADDR_RANGE": "169.254.0.0/16"},  # two hosts and a cable, on purpose
    ],
)
def test_a_link_local_ipv4_address_that_does_no_harm(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    same = auto(tmp_path, good=True, **settings)
    assert judge(CHECK, cluster(same, same)) == []


def test_a_link_local_ipv4_address_after_the_good_one(tmp_path: Path) -> None:
    same = host(tmp_path, {1: (MAPPED, "RoCE v2"), 2: AUTO})
    assert judge(CHECK, cluster(same, same)) == []


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
