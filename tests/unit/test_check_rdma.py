"""RDMA ports of made-up hosts, and of a made-up sysfs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Launch,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.checks.rdma import Rdma
from nccl_doctor.model.cluster import Outcome
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.libraries import compiled
from tests.support.observing import observe

CHECK = Rdma()
LOADS = ("libc.so.6",)
"""Stands in for libibverbs: a library that can be loaded."""


def port(device: str = "mlx5_0", state: str = "ACTIVE", **more: Any) -> dict[str, Any]:
    return {
        "device": device,
        "port": "1",
        "state": state,
        "physical": "LinkUp" if state == "ACTIVE" else "Disabled",
        "link": "InfiniBand",
        "rate": "400 Gb/sec (4X NDR)",
        "wanted": True,
        **more,
    }


def host(*ports: dict[str, Any], road: str = "infiniband", **settings: str) -> dict[str, Any]:
    told = {name: [value, "environment"] for name, value in settings.items()}
    return {"ports": list(ports), "road": road, "settings": told}


HEALTHY = host(port(), port("mlx5_1"))


def cluster(*hosts: dict[str, Any], backend: str = "nccl", **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="rdma", by_host=seen, backend=backend, **fields)


@pytest.mark.parametrize(
    "hosts",
    [
        [HEALTHY] * 3,
        [host(road="sockets")] * 3,
        [host(port(), port("mlx5_1", "DOWN"))] * 3,  # nobody uses that one
        [host(port(), road="sockets", NCCL_IB_DISABLE="1")] * 2,
        [HEALTHY],
        [host(road="plugin"), HEALTHY, HEALTHY],  # who knows what a plug-in does
    ],
)
def test_hosts_that_agree_are_fine(hosts: list[dict[str, Any]]) -> None:
    assert judge(CHECK, cluster(*hosts)) == []


def test_a_host_without_an_active_port_goes_by_sockets_alone() -> None:
    sick = host(port(state="DOWN"), port("mlx5_1", "INIT"), road="sockets")
    found = only(CHECK, cluster(HEALTHY, sick, HEALTHY), "rdma-mixed", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "infiniband on nd0, nd2; sockets on nd1" in found.message
    assert "mlx5_0:1 DOWN" in found.message


def test_the_variable_that_decided_is_named() -> None:
    odd = host(port(), road="sockets", NCCL_IB_DISABLE="1")
    found = only(CHECK, cluster(HEALTHY, HEALTHY, odd), "rdma-mixed", hosts=["nd2"])
    assert "NCCL_IB_DISABLE=1" in found.message
    assert found.fix.startswith("unset NCCL_IB_DISABLE; or ")
    same = [host(port(), NCCL_IB_HCA="mlx5"), host(port(), NCCL_IB_HCA="mlx5")]
    sick = host(port(state="DOWN"), road="sockets", NCCL_IB_HCA="mlx5")
    found = only(CHECK, cluster(*same, sick), "rdma-mixed", hosts=["nd2"])
    assert (found.fix, "ibstat" in found.kind.fix) == ("", True)
    without = host(road="sockets")
    found = only(CHECK, cluster(HEALTHY, HEALTHY, without), "rdma-mixed", hosts=["nd2"])
    assert "docker run --device" in found.fix


def test_of_two_hosts_nobody_can_tell_which_one_is_odd() -> None:
    found = only(CHECK, cluster(HEALTHY, host(road="sockets")), "rdma-mixed", hosts=["nd0", "nd1"])
    assert found.confidence is Confidence.POSSIBLE


def test_of_two_hosts_the_one_whose_ports_are_all_down_is_named() -> None:
    sick = host(port(state="DOWN"), road="sockets")
    found = only(CHECK, cluster(HEALTHY, sick), "rdma-mixed", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.POSSIBLE)
    assert found.message.endswith("on nd1: mlx5_0:1 DOWN")


def test_one_port_of_a_host_is_down() -> None:
    sick = host(port(), port("mlx5_1", "DOWN"))
    found = only(
        CHECK,
        cluster(HEALTHY, sick, HEALTHY),
        "rdma-port-down",
        hosts=["nd1"],
        interfaces=["mlx5_1:1"],
    )
    assert found.level is Severity.WARN
    assert "mlx5_1:1 is DOWN" in found.message


def test_a_port_that_the_user_left_out_may_be_down() -> None:
    spare = host(port(), port("mlx5_1", "DOWN", wanted=False))
    assert judge(CHECK, cluster(HEALTHY, spare, HEALTHY)) == []


def test_gloo_uses_no_rdma() -> None:
    assert judge(CHECK, cluster(HEALTHY, host(road="sockets"), HEALTHY, backend="gloo")) == []
    with pytest.raises(Skip, match="does not use NCCL"):
        CHECK.observe(Context(launch=Launch(), env={}, backend="gloo"))


def look(root: Path, libraries: tuple[str, ...] = LOADS, **env: str) -> dict[str, Any]:
    env = {"NCCL_CONF_FILE": "/nonexistent", **env}
    return observe(Rdma, env, backend="nccl", root=root, libraries=libraries)


@pytest.mark.parametrize(
    ("env", "road", "wanted"),
    [
        ({}, "infiniband", [True, True]),
        ({"NCCL_IB_DISABLE": "1"}, "sockets", [True, True]),
        ({"NCCL_IB_HCA": "mlx5_1"}, "sockets", [False, True]),
        ({"NCCL_IB_HCA": "^mlx5_1"}, "infiniband", [True, False]),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, "infiniband", [True, False]),
        ({"NCCL_IB_HCA": "=mlx5_0:2"}, "sockets", [False, False]),
        ({"NCCL_NET": "Socket"}, "sockets", [True, True]),
        ({"NCCL_NET": "IB", "NCCL_IB_HCA": "mlx5_1"}, "none", [False, True]),
    ],
)
def test_ports_are_read_from_sysfs(
    tmp_path: Path, env: dict[str, str], road: str, wanted: list[bool]
) -> None:
    fabrics.add_device(tmp_path, "mlx5_0")
    fabrics.add_device(tmp_path, "mlx5_1", state="1: DOWN", pci="0000:1b:00.0")
    found = look(tmp_path, LOADS, **env)
    assert [(p["device"], p["state"], p["physical"]) for p in found["ports"]] == [
        ("mlx5_0", "ACTIVE", "LinkUp"),
        ("mlx5_1", "DOWN", "Disabled"),
    ]
    assert [p["wanted"] for p in found["ports"]] == wanted
    assert found["road"] == road
    assert found["uses"] == (["mlx5_0:1"] if road == "infiniband" else [])


def test_the_ports_are_asked_for_their_mtu(tmp_path: Path) -> None:
    root = fabrics.connectx7(tmp_path / "host", 4)
    mtus = {"mlx5_0": 5, "mlx5_1": 4, "mlx5_2": 0, "other": 5}
    verbs = compiled(tmp_path / "libibverbs.so.1", fabrics.verbs_source(**mtus))
    found = look(root, ("libibverbs-not-here.so", str(verbs)))
    assert found["library"] == ""
    assert found["mtus"] == {"mlx5_0:1": 4096, "mlx5_1:1": 2048}
    assert look(root, (str(verbs),), NCCL_IB_HCA="^mlx5_0")["mtus"] == {"mlx5_1:1": 2048}
    assert look(root, (str(verbs),), NCCL_IB_DISABLE="1")["mtus"] == {}
    assert look(root)["mtus"] == {}  # a library that is none


def test_a_host_without_devices(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert (found["ports"], found["road"], found["plugin"]) == ([], "sockets", None)


class TestUnusable:
    """Devices in sysfs that the process may not use, as in a container that was given none."""

    def test_a_container_without_the_device_files(self, tmp_path: Path) -> None:
        good = look(fabrics.connectx7(tmp_path / "good", 2))
        fabrics.add_device(tmp_path / "bad", "mlx5_0", opens=False)
        fabrics.add_device(tmp_path / "bad", "mlx5_1", opens=False, pci="0000:1b:00.0")
        bad = look(tmp_path / "bad")
        assert (bad["road"], bad["lacks"]) == ("sockets", "access")
        found = only(
            CHECK,
            cluster(good, bad, good),
            "rdma-unusable",
            hosts=["nd1"],
            interfaces=["mlx5_0:1", "mlx5_1:1"],
        )
        assert found.level is Severity.FAIL
        assert "/dev/infiniband/uverbs0: No such file or directory" in found.message
        assert "NCCL would use sockets" in found.message
        assert "--device=/dev/infiniband" in (found.fix or found.kind.fix)
        codes = {f.code: f.explained_by for f in judge(CHECK, cluster(good, bad, good))}
        assert codes == {"rdma-unusable": None, "rdma-mixed": "rdma-unusable"}

    def test_a_device_that_may_not_be_opened(self, tmp_path: Path) -> None:
        fabrics.connectx7(tmp_path, 1)
        file = tmp_path / "dev/infiniband/uverbs0"
        file.unlink()
        file.mkdir()  # as root may open any file
        assert look(tmp_path)["barred"] == {
            "mlx5_0": "/dev/infiniband/uverbs0: Is a directory",
        }

    def test_an_image_without_the_library(self, tmp_path: Path) -> None:
        fabrics.connectx7(tmp_path, 2)
        good, bad = look(tmp_path), look(tmp_path, ("libibverbs-not-here.so",))
        found = only(
            CHECK,
            cluster(bad, good, good),
            "rdma-unusable",
            hosts=["nd0"],
            interfaces=["mlx5_0:1", "mlx5_1:1"],
        )
        assert found.level is Severity.FAIL
        assert "libibverbs-not-here.so: cannot open" in found.message
        assert "libibverbs1" in found.fix

    def test_where_no_host_can_it_runs_but_slowly(self, tmp_path: Path) -> None:
        fabrics.connectx7(tmp_path, 1)
        bad = look(tmp_path, ("libibverbs-not-here.so",))
        found = judge(CHECK, cluster(bad, bad))
        assert {(f.code, f.level) for f in found} == {("rdma-unusable", Severity.WARN)}

    def test_one_of_two_devices_on_one_host_alone(self, tmp_path: Path) -> None:
        good = look(fabrics.connectx7(tmp_path / "good", 2))
        fabrics.add_device(tmp_path / "bad", "mlx5_0")
        fabrics.add_device(tmp_path / "bad", "mlx5_1", opens=False, pci="0000:1b:00.0")
        bad = look(tmp_path / "bad")
        found = only(
            CHECK,
            cluster(good, good, bad),
            "rdma-unusable",
            hosts=["nd2"],
            interfaces=["mlx5_1:1"],
        )
        assert (found.level, bad["road"]) == (Severity.WARN, "infiniband")
        assert "1 ports are left, 2 on other hosts" in found.message
        # Pods that share a host are each given some: nothing is wrong where all have as many.
        alike = judge(CHECK, cluster(bad, bad))
        assert {f.level for f in alike} == {Severity.INFO}

    def test_where_nccl_may_take_nothing_else_it_ends(self, tmp_path: Path) -> None:
        bad = look(tmp_path, NCCL_NET="IB")
        found = judge(CHECK, cluster(bad, bad))
        assert {(f.code, f.level) for f in found} == {("rdma-unusable", Severity.FAIL)}
        assert "no verbs port is active" in found[0].message
        assert "docker" not in found[0].fix


def test_a_tie_between_a_host_that_cannot_and_one_that_can(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 1)
    good, bad = look(tmp_path), look(tmp_path, ("libibverbs-not-here.so",))
    only(CHECK, cluster(good, bad), "rdma-unusable", hosts=["nd1"], interfaces=["mlx5_0:1"])
    places = {found.code: found.where.hosts for found in judge(CHECK, cluster(good, bad))}
    assert places == {"rdma-unusable": ("nd1",), "rdma-mixed": ("nd1",)}


def test_a_report_of_an_earlier_version_can_still_be_judged() -> None:
    assert judge(CHECK, cluster(HEALTHY, HEALTHY)) == []


def test_a_host_without_efa_among_hosts_that_have_it() -> None:
    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    found = only(CHECK, cluster(have, have, host(road="sockets")), "rdma-mixed", hosts=["nd2"])
    assert "efa on nd0, nd1; sockets on nd2" in found.message


def test_efa_without_its_plug_in_is_told_by_another_check() -> None:
    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    made = cluster(have, have, host(road="sockets"))
    facts = {"net_plugin": {ALONE: outcome({"loaded": None})}}
    hosts = tuple(replace(each, facts={**each.facts, **facts}) for each in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    assert judge(CHECK, replace(made, hosts=hosts, ranks=ranks)) == []


def test_efa_is_no_verbs_port_for_nccl(tmp_path: Path) -> None:
    plugin = compiled(tmp_path / "libnccl-net-ofi.so", "int ncclNetPlugin_v9;")
    root = fabrics.efa(tmp_path / "efa")
    found = look(root, NCCL_NET_PLUGIN=str(plugin))
    assert (found["road"], found["ports"][0]["wanted"]) == ("efa", False)
    assert found["plugin"] == str(plugin)
    assert found["picks"]["rows"][0] == [
        "data between hosts",
        "efa",
        f"EFA, and {plugin} can be loaded",
    ]
    without = look(root, NCCL_NET_PLUGIN="/nonexistent.so")
    assert (without["road"], without["lacks"]) == ("sockets", "plugin")


class TestEfaDevices:
    """EFA in sysfs, and device files that a container was given, or not."""

    @pytest.fixture
    def see(self, tmp_path: Path) -> Callable[..., dict[str, Any]]:
        plugin = compiled(tmp_path / "libnccl-net-ofi.so", "int ncclNetPlugin_v9;")

        def see(given: int, **env: str) -> dict[str, Any]:
            root = fabrics.efa(tmp_path / "-".join([str(given), *env.values()]))
            for number in range(given, 4):
                (root / f"dev/infiniband/uverbs{number}").unlink()
            return look(root, NCCL_NET_PLUGIN=str(plugin), **env)

        return see

    def test_none_on_one_host(self, see: Callable[..., dict[str, Any]]) -> None:
        good, bad = see(4), see(0)
        assert judge(CHECK, cluster(good, good)) == []
        assert (good["barred"], bad["road"], bad["lacks"]) == ({}, "sockets", "access")
        names = [f"rdmap{number}s0:1" for number in range(4)]
        for hosts, odd in (((good, bad), "nd1"), ((bad, good, good), "nd0")):
            said = judge(CHECK, cluster(*hosts))
            assert {each.where.hosts for each in said} == {(odd,)}
            codes = {each.code: each.explained_by for each in said}
            assert codes == {"rdma-unusable": None, "rdma-mixed": "rdma-unusable"}
            found = only(CHECK, cluster(*hosts), "rdma-unusable", hosts=[odd], interfaces=names)
            assert found.level is Severity.FAIL
            assert "rdmap0s0: /dev/infiniband/uverbs0: No such file or directory" in found.message
            assert found.message.endswith("; NCCL would use sockets")
            assert "vpc.amazonaws.com/efa" in found.fix

    def test_none_on_any_host(self, see: Callable[..., dict[str, Any]]) -> None:
        """The job runs, by sockets; where NCCL_NET asks for libfabric it does not start."""
        for env, level in (({}, Severity.WARN), ({"NCCL_NET": "Libfabric"}, Severity.FAIL)):
            bad = see(0, **env)
            said = judge(CHECK, cluster(bad, bad))
            assert {(each.code, each.level) for each in said} == {("rdma-unusable", level)}
        assert judge(CHECK, cluster(see(0, NCCL_NET="Socket"))) == []

    def test_a_part_of_them(self, see: Callable[..., dict[str, Any]]) -> None:
        """Pods that share a host are each given some: that is fine where all have as many."""
        good, share = see(4), see(1)
        alike = judge(CHECK, cluster(share, share))
        assert {(each.code, each.level) for each in alike} == {("rdma-unusable", Severity.INFO)}
        for hosts, odd in (((good, share), "nd1"), ((share, good), "nd0")):
            names = [f"rdmap{number}s0:1" for number in (1, 2, 3)]
            found = only(CHECK, cluster(*hosts), "rdma-unusable", hosts=[odd], interfaces=names)
            assert (found.level, share["road"]) == (Severity.WARN, "efa")
            assert found.message.endswith("; 1 ports are left, 4 on other hosts")

    def test_beside_infiniband_that_was_not_given(self, tmp_path: Path) -> None:
        """Hosts with EFA and a few ConnectX: their pods get the EFA devices alone."""
        root = fabrics.efa(tmp_path / "host")
        fabrics.add_device(root, "mlx5_0", opens=False)
        plugin = compiled(tmp_path / "libnccl-net-ofi.so", "int ncclNetPlugin_v9;")
        pod = look(root, NCCL_NET_PLUGIN=str(plugin))
        assert (pod["road"], [*pod["barred"]]) == ("efa", ["mlx5_0"])
        said = judge(CHECK, cluster(pod, pod))
        assert {(each.code, each.level) for each in said} == {("rdma-unusable", Severity.INFO)}
        # Where another host would go by its ConnectX, that matters.
        said = judge(CHECK, cluster(look(fabrics.connectx7(tmp_path / "other", 1)), pod))
        levels = {each.code: each.level for each in said}
        assert levels == {"rdma-unusable": Severity.FAIL, "rdma-mixed": Severity.FAIL}


def test_a_security_group_may_stop_efa() -> None:
    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    hung = Outcome(OutcomeStatus.HUNG, reason="all_reduce")
    made = cluster(have, have)
    ranks = tuple(replace(r, facts={"collectives": {"world": hung}}) for r in made.ranks)
    found = only(CHECK, replace(made, ranks=ranks), "efa-maybe-blocked", hosts=["nd0", "nd1"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert judge(CHECK, made) == []
