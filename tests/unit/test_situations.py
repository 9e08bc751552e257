"""What is said of a situation does not depend on who started the ranks; but the fix names him."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from nccl_doctor.api import Check, Cluster, Severity
from nccl_doctor.checks.backend_device import BackendDevice
from nccl_doctor.checks.interfaces import Interfaces
from nccl_doctor.checks.launch_record import LaunchRecord
from nccl_doctor.checks.master_addr import MasterAddr
from nccl_doctor.checks.master_network import MasterNetwork
from nccl_doctor.checks.own_name import OwnName
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.clusters import change_rank, make_cluster
from tests.support.findings import judge
from tests.support.gpu_facts import facts as gpu_facts
from tests.support.launches import BY_ENVIRONMENT, of_rank
from tests.support.merging import with_facts
from tests.support.peers import World

LAUNCHERS = (*BY_ENVIRONMENT, "own")
HOSTS = ("nd0", "nd1")
WITHOUT_IPV4 = {"nd0": "fd77::1", "nd1": "fd77::2"}
ALONE_IN_THEIR_NET = {"nd0": "10.128.0.2", "nd1": "10.128.0.3"}


def started_by(launcher: str, cluster: Cluster, master: str = "nd0") -> Cluster:
    for rank in cluster.ranks:
        launch = vars(of_rank(launcher, rank.seat, master))
        cluster = change_rank(cluster, rank.seat, launch=launch)
    return cluster


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        ("torchrun", "# --nproc-per-node 3"),
        ("accelerate", "# --num_processes 6"),
        ("deepspeed", "# --num_gpus 3"),
        ("ray", "ScalingConfig(use_gpu=True, resources_per_worker={'GPU': 1})"),
        ("env", "start 3 ranks on this host"),
        ("srun", "# --ntasks-per-node=3"),
        ("mpirun", "# --map-by ppr:3:node"),
        ("mpi", "# -ppn 3"),
        ("own", "# --nproc-per-node 3"),
    ],
)
def test_more_ranks_than_gpus(launcher: str, fix: str) -> None:
    by_rank = {rank: gpu_facts(rank // 4, rank % 4, gpus=4) for rank in range(8)}
    by_rank |= {rank: gpu_facts(1, rank % 4, gpus=3) for rank in range(4, 8)}
    made = make_cluster(HOSTS, 4, check="backend_device", by_rank=by_rank, backend="nccl")
    found = [each for each in judge(BackendDevice(), started_by(launcher, made)) if each.where]
    missing = [each for each in found if each.code == "gpu-missing"]
    assert {each.code for each in found if each.level is Severity.FAIL} == {"gpu-missing"}
    assert [(each.where.hosts, each.where.ranks) for each in missing] == [(("nd1",), (7,))]
    assert missing[0].fix.removeprefix("on every host: ").startswith(fix)


def with_addresses(launcher: str, of: Mapping[str, str], bits: int, master: str) -> Cluster:
    """A healthy cluster whose hosts have these addresses only, each on eth0."""
    gateway = "fe80::1" if ":" in of["nd0"] else "169.254.1.1"
    net = {name: str(ip_network(f"{own}/{bits}", strict=False)) for name, own in of.items()}

    def look(name: str, answer: str) -> dict[str, Any]:
        return LookUp(name, (answer,), "", (0.001,)).to_json()

    world = World(2)
    for name, address in of.items():
        nic = world.facts[name]["interfaces"][0]
        nic |= {"addresses": [address], "subnets": [net[name]], "gateways": [gateway]}
        for choice in world.facts[name]["choices"].values():
            choice["picks"] = [["eth0", address]]
    seen = {
        "interfaces": {name: world.facts[name] for name in HOSTS},
        "master_addr": {
            name: {
                "master_addr": master,
                "master": look(master, of["nd0"]),
                "reverse": [look(of["nd0"], "nd0")],
                "no_route": [],
                "interfaces": [["eth0", [of[name]]]],
            }
            for name in HOSTS
        },
        "master_network": {
            name: {
                "master_addr": master,
                "answers": [of["nd0"]],
                "networks": [["eth0", of[name], net[name]]],
            }
            for name in HOSTS
        },
        "own_name": {
            name: {
                "own": look(name, of[name]),
                "interfaces": [["eth0", [of[name]]]],
                "source": of[name],
            }
            for name in HOSTS
        },
    }
    cluster = started_by(launcher, make_cluster(HOSTS, 4), master)
    hosts = tuple(replace(host, addresses=(of[host.name or ""],)) for host in cluster.hosts)
    cluster = replace(cluster, hosts=hosts)
    for check, by_host in seen.items():
        cluster = with_facts(cluster, check, by_host)
    return cluster


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("addresses", "bits", "master"),
    [
        (ALONE_IN_THEIR_NET, 32, "nd0"),
        (WITHOUT_IPV4, 128, "nd0"),
        (WITHOUT_IPV4, 64, "nd0"),
        (WITHOUT_IPV4, 64, "fd77::1"),
    ],
    ids=["/32", "/128", "IPv6 only", "IPv6 only, by address"],
)
def test_a_healthy_network_has_no_finding(
    launcher: str, addresses: Mapping[str, str], bits: int, master: str
) -> None:
    cluster = with_addresses(launcher, addresses, bits, master)
    checks: tuple[Check, ...] = (
        LaunchRecord(), Ranks(), MasterAddr(), MasterNetwork(), OwnName(), Interfaces(),
    )  # fmt: skip
    found = [each for check in checks for each in judge(check, cluster)]
    assert [each for each in found if each.level is not Severity.INFO] == []
    assert {rank.launch and rank.launch.master_addr for rank in cluster.ranks} == {master}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_wrong_there_is_said_of_the_same_host(launcher: str) -> None:
    """nd1 resolves the master to an address that no host has."""
    cluster = with_addresses(launcher, WITHOUT_IPV4, 64, "nd0")
    wrong = {**cluster.hosts[1].facts["master_addr"]["alone"].facts}
    wrong["master"] = LookUp("nd0", ("fd77::99",), "", (0.001,)).to_json()
    before = {**cluster.hosts[0].facts["master_addr"]["alone"].facts}
    cluster = with_facts(cluster, "master_addr", {"nd0": before, "nd1": wrong})
    found = judge(MasterAddr(), cluster)
    assert [(each.code, each.where.hosts) for each in found] == [("addr-differs", ("nd1",))]
