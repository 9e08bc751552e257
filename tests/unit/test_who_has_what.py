"""Every finding about a difference says who has which value, and names a host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from nccl_doctor import registry
from nccl_doctor.api import Cluster, Finding
from tests.support import fabrics
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster
from tests.support.environments import cluster_of as environments
from tests.support.gpu_facts import gpu as seen_gpu
from tests.support.gpu_states import cluster_of as gpu_states
from tests.support.gpu_states import every as gpus
from tests.support.gpu_states import state
from tests.support.peers import NO_ROUTE, World, nic
from tests.support.racks import rack, serves, tray
from tests.support.rows import each_row
from tests.unit import (
    test_check_amd_gpus,
    test_check_backend_device,
    test_check_clock,
    test_check_cpus,
    test_check_driver_libraries,
    test_check_fabric_ports,
    test_check_libraries,
    test_check_master_addr,
    test_check_meeting_point,
    test_check_nccl_plugins,
    test_check_net_plugin,
    test_check_own_name,
    test_check_partition_keys,
    test_check_rails,
    test_check_rdma,
    test_check_roce_gids,
    test_check_seeds,
    test_check_software,
    test_check_torch_nccl,
    test_gpu_nics,
    test_gpu_orders,
)

Sides = Sequence[int]
Made = tuple[str, Cluster]
"""The check that judges, and what it judges."""
Make = Callable[[Sides, Path], Made]

TWO, THREE = (0, 1), (0, 0, 1)
"""Which of two values each host has: equally many each, and an odd one out."""

EXCEPTIONS = {
    "addr-family-mixed": "the addresses of one name, on one host",
    "backend-device-mismatch": "a backend and a build of torch, on one rank",
    "bond-speeds-differ": "the members of one bond, each with its speed",
    "bond-split": "the members of one bond",
    "doctor-version-differs": "made where one host does not understand another's message",
    "collective-mismatch": "the calls of ranks of a dead job",
    "collective-order": "the calls of ranks of a dead job",
    "cuda-wheels-collide": "the owners of one file, on one rank",
    "driver-mismatch": "a library and the kernel module of one host",
    "gpu-guess-differs": "two numbers of a GPU, on one rank",
    "hostname-duplicate": "a name that hosts have in common",
    "ipc-namespace-split": "the ranks of one host",
    "key-differs": "keys are secrets, and not compared",
    "launch-sources-disagree": "two variables of one rank",
    "machine-id-duplicate": "an id that hosts have in common",
    "nccl-answer-differs": "what NCCL does, and what it is expected to do, on one host",
    "setup-changed": "earlier runs of the same hosts",
    "world-size-config-mismatch": "a configuration, and the world that all ranks have",
}
"""Codes that sound like a difference between hosts, and are none."""


def names_of(sides: Sides) -> list[str]:
    return [f"nd{number}" for number in range(len(sides))]


def of_hosts(check: str, sides: Sides, *facts: Any, **fields: Any) -> Made:
    """A cluster of hosts with one rank, each with the facts of its side."""
    by_host = {f"nd{number}": facts[side] for number, side in enumerate(sides)}
    return check, make_cluster(list(by_host), 1, check=check, by_host=by_host, **fields)


def told(sides: Sides, **values: Sequence[Any]) -> Cluster:
    """Hosts with two ranks whose launch records differ."""
    cluster = make_cluster(names_of(sides))
    for rank in cluster.ranks:
        launch = {name: both[sides[rank.host.id]] for name, both in values.items()}
        cluster = change_rank(cluster, rank.seat, launch=launch)
    return cluster


def trees(sides: Sides, tmp: Path, make: Callable[[Path, int], Any]) -> list[Any]:
    """What each host sees of the tree of its side."""
    seen = [make(tmp / str(side), side) for side in (0, 1)]
    return [seen[side] for side in sides]


def fabric_port(root: Path, **device: Any) -> Any:
    fabrics.add_device(root, "mlx5_0", **device)
    return test_check_fabric_ports.look(root)


def fabric(*both: Mapping[str, Any]) -> Make:
    def make(sides: Sides, tmp: Path) -> Made:
        seen = trees(sides, tmp, lambda root, side: fabric_port(root, **both[side]))
        return "fabric_ports", test_check_fabric_ports.cluster(*seen)

    return make


def of_rails(look: Callable[[Path, int], Any]) -> Make:
    def make(sides: Sides, tmp: Path) -> Made:
        return "rails", test_check_rails.cluster(*trees(sides, tmp, look))

    return make


def nets(*of_sides: Sequence[str], names: Sequence[Sequence[int]] = ((0, 1), (0, 1))) -> Make:
    """Hosts with a NIC for each of these networks, under these numbers."""

    def look(root: Path, side: int) -> Any:
        return test_check_rails.look(test_check_rails.roce(root, of_sides[side], names[side]))

    return of_rails(look)


def slots(root: Path, side: int) -> Any:
    """One list of names, which means other slots."""
    numbers = (0, 2, 1) if side else (0, 1, 2)
    tree = test_check_rails.roce(root, ("10.0.0.0/24",) * 3, numbers)
    return test_check_rails.look(tree, NCCL_IB_HCA="=mlx5_0,mlx5_1")


def partition(sides: Sides, tmp: Path) -> Made:
    keys = (test_check_partition_keys.JOB, test_check_partition_keys.OTHER)
    seen = trees(sides, tmp, lambda root, side: test_check_partition_keys.host(root, [keys[side]]))
    return "partition_keys", test_check_partition_keys.cluster(*seen)


def gids(sides: Sides, tmp: Path) -> Made:
    local = ({}, {"NCCL_IB_GID_INDEX": "0"})
    seen = trees(
        sides, tmp, lambda root, side: test_check_roce_gids.host(root, None, **local[side])
    )
    return "roce_gids", test_check_roce_gids.cluster(*seen)


def packets(sides: Sides, tmp: Path) -> Made:
    world = World(len(sides))
    for name, side in zip(world.names, sides, strict=True):
        world.facts[name]["interfaces"][0]["mtu"] = (1500, 1400)[side]
    return "interfaces", world.cluster()


def networks(sides: Sides, tmp: Path) -> Made:
    world = World(len(sides))
    *others, moved = world.names
    listen = {"interface": "eth1", "address": "10.5.0.1", "roles": ["nccl-bootstrap"]}
    world.facts[moved]["interfaces"] = [nic("eth1", "10.5.0.1"), nic("lo", "127.0.0.1")]
    world.facts[moved]["listen"] = [listen]
    return "interfaces", world.fail([(other, moved) for other in others], NO_ROUTE).cluster()


def software(sides: Sides, tmp: Path) -> Made:
    facts = test_check_software.FACTS
    both = facts, {**facts, "torch": "2.12.1+cu130"}
    cluster = test_check_software.cluster_of(
        {number: both[side] for number, side in enumerate(sides)}, hosts=len(sides), nproc=1
    )
    return "software", cluster


def libraries(sides: Sides, tmp: Path) -> Made:
    row, nccl = test_check_libraries.row, test_check_libraries.NCCL
    both = [
        test_check_libraries.facts(nccl, row("libcudnn", version, f"nvidia-cudnn-cu12 {version}.1"))
        for version in ("9.10.2", "9.13.0")
    ]
    return "libraries", test_check_libraries.cluster_of(*(both[side] for side in sides))


def random_numbers(sides: Sides, tmp: Path) -> Made:
    drew = test_check_seeds.drew
    return of_ranks("seeds", sides, drew("a"), drew("b"))


def of_ranks(check: str, sides: Sides, *facts: Any, **fields: Any) -> Made:
    by_rank = {number: facts[side] for number, side in enumerate(sides)}
    return check, make_cluster(names_of(sides), 1, check=check, by_rank=by_rank, **fields)


def libcuda(sides: Sides, tmp: Path) -> Made:
    paths = (f"{test_check_driver_libraries.LIB}/libcuda.so.580.95.05",
             test_check_driver_libraries.COMPAT)  # fmt: skip
    every = test_check_driver_libraries.every
    return "driver_libraries", every(*(paths[side] for side in sides))


def models(sides: Sides, tmp: Path) -> Made:
    a100 = "NVIDIA A100-SXM4-80GB"
    ranks: dict[int, Any] = {}
    for node, side in enumerate(sides):
        some = [seen_gpu(node, n, a100, (8, 0)) for n in range(8)]
        ranks |= test_check_backend_device.one_host(node, 8, **({"devices": some} if side else {}))
    made = test_check_backend_device.cluster_of(ranks, hosts=len(sides))
    return "backend_device", made


def nics(sides: Sides, tmp: Path) -> Made:
    turned = {0: 1, 1: 0}
    changes = {
        8 * node + gpu: test_gpu_nics.rank(gpu, at=[at], names=[f"mlx5_{at}:1"])
        for node, side in enumerate(sides)
        for gpu, at in (turned.items() if side else ())
    }
    return "gpu_affinity", test_gpu_nics.cluster(changes, hosts=len(sides))


def orders(sides: Sides, tmp: Path) -> Made:
    both = test_gpu_orders.STRAIGHT, test_gpu_orders.TURNED
    return "backend_device", test_gpu_orders.cluster(*(both[side] for side in sides))


def environment(sides: Sides, tmp: Path) -> Made:
    nets = ("IB", "Socket")
    envs = [{"NCCL_NET": nets[side]} for side in sides]
    return "environment", environments(envs)


def proxies(sides: Sides, tmp: Path) -> Made:
    envs = [{"http_proxy": "http://10.0.0.9:3128"} if side else {} for side in sides]
    return "environment", environments(envs)


def named_files(sides: Sides, tmp: Path) -> Made:
    env = {"NCCL_TOPO_FILE": "/t.xml"}
    files = [{"name": "NCCL_TOPO_FILE", "path": "/t.xml", "use": "read"}]
    of_rank = {
        rank: {"files": [{**files[0], "digest": ("beef", "cafe")[side]}]}
        for rank, side in enumerate(sides)
    }
    return "environment", environments([env] * len(sides), of_rank=of_rank)


def net_plugins(sides: Sides, tmp: Path) -> Made:
    both = test_check_net_plugin.PLAIN, test_check_net_plugin.facts_of(loaded="libnccl-net.so")
    return "net_plugin", test_check_net_plugin.cluster_of(*(both[side] for side in sides))


def tuners(sides: Sides, tmp: Path) -> Made:
    both = test_check_nccl_plugins.NOTHING, test_check_nccl_plugins.TUNED
    return "nccl_plugins", test_check_nccl_plugins.cluster_of(*(both[side] for side in sides))


def net_builds(sides: Sides, tmp: Path) -> Made:
    plugin, nothing = test_check_nccl_plugins.plugin, test_check_nccl_plugins.NOTHING
    both = [{**nothing, "tuner": plugin("T=x", "libx.so", 4, 5, mark=m * 9)} for m in "ab"]
    return "nccl_plugins", test_check_nccl_plugins.cluster_of(*(both[side] for side in sides))


def addresses(sides: Sides, tmp: Path) -> Made:
    facts = test_check_master_addr.facts
    answers = (test_check_master_addr.ND0, "10.9.9.9")
    by_host = {f"nd{n}": facts(f"nd{n}", answers[side]) for n, side in enumerate(sides)}
    return "master_addr", test_check_master_addr.cluster_of(by_host)


def roads(sides: Sides, tmp: Path) -> Made:
    both = test_check_rdma.HEALTHY, test_check_rdma.host(road="sockets")
    return "rdma", test_check_rdma.cluster(*(both[side] for side in sides))


def ports(sides: Sides, tmp: Path) -> Made:
    both = (29500, 29511)
    by_host = {f"nd{n}": both[side] for n, side in enumerate(sides)}
    return "meeting_point", test_check_meeting_point.apart(by_host)


def backends(sides: Sides, tmp: Path) -> Made:
    cluster = make_cluster(names_of(sides), 1)
    for rank in cluster.ranks:
        backend = ("nccl", "gloo")[sides[rank.host.id]]
        cluster = change_rank(cluster, rank.seat, backend=backend)
    return "launch_record", cluster


ROCE: Mapping[str, Any] = {"layer": "Ethernet", "gids": fabrics.roce_gids()}

CASES: list[tuple[str, tuple[str, str], Make]] = [
    ("addr-differs", ("192.168.77.1", "10.9.9.9"), addresses),
    ("backend-option-differs", ("nccl", "gloo"), backends),
    ("clock-skew", ("+0.0", "+20.0"),
     lambda sides, _: ("clock", test_check_clock.cluster([20.0 * side for side in sides], 0.0))),
    ("cpu-differs", ("Intel", "AMD"),
     lambda sides, _: ("cpus", test_check_cpus.kinds(
         *((test_check_cpus.INTEL, test_check_cpus.AMD)[side] for side in sides)))),
    ("cpu-governor-differs", ("performance", "schedutil"),
     lambda sides, _: ("cpus", test_check_cpus.clocks(
         *(test_check_cpus.clock(("performance", "schedutil")[side]) for side in sides)))),
    ("env-differs", ("NCCL_NET=IB", "NCCL_NET=Socket"), environment),
    ("env-differs", ("no proxy", "a proxy"), proxies),
    ("env-file-differs", ("sha256 beef", "sha256 cafe"), named_files),
    ("gloo-families-differ", ("IPv4", "IPv6"),
     lambda sides, _: ("own_name", test_check_own_name.choosing(
         *((f"192.168.77.{n + 1}", f"fd00::{n + 1}")[side] for n, side in enumerate(sides))))),
    ("gpu-differs", ("H100", "A100"), models),
    ("gpu-differs", ("700 W", "500 W"),
     lambda sides, _: ("gpu_state", gpu_states(*(
         gpus(node, power_limit_mw=500_000, default_power_limit_mw=500_000)
         if side else state(node) for node, side in enumerate(sides))))),
    ("gpu-differs", ("NPS1", "NPS4"),
     lambda sides, _: ("amd_gpus", test_check_amd_gpus.cluster_of(*(
         test_check_amd_gpus.state(node, each={"memory_partition": ("NPS1", "NPS4")[side]})
         for node, side in enumerate(sides))))),
    ("gpu-nic-pairs-differ", ("0: mlx5_0:1", "0: mlx5_1:1"), nics),
    ("gpu-order-differs", ("0, 1, 2, 3", "1, 0, 2, 3"), orders),
    ("imex-nodes-differ", ("192.168.77.1", "192.168.77.41"),
     lambda sides, _: ("imex_service", rack(
         *map(tray, range(len(sides))),
         services={n: serves(*range(9), *([40] if side else [0])) for n, side in enumerate(sides)},
     ))),
    ("launch-run-id-differs", ("a", "b"),
     lambda sides, _: ("launch_record", told(sides, run_id=("a", "b")))),
    ("libcuda-differs", ("the driver's own", "compat 590"), libcuda),
    ("library-differs", ("9.10.2", "9.13.0"), libraries),
    ("master-port-differs", ("29500", "29511"), ports),
    ("interface-differs", ("192.168.77.0/24", "10.5.0.0/24"), networks),
    ("mtu-differs", ("1500", "1400"), packets),
    ("nccl-backend-differs", ("nccl-legacy", "nccl2"),
     lambda sides, _: ("torch_nccl", test_check_torch_nccl.cluster_of(*(
         test_check_torch_nccl.facts_of(("2.13.0", "2.15.0")[side]) for side in sides)))),
    ("nccl-plugin-differs", ("none", "libx.so"), tuners),
    ("nccl-plugin-differs", ("aaaaaaaa", "bbbbbbbb"), net_builds),
    ("net-plugin-differs", ("none", "libnccl-net.so"), net_plugins),
    ("nnodes-differs", ("2", "4"),
     lambda sides, _: ("ranks", told(sides, nnodes=(2, 4)))),
    ("nproc-differs", ("2", "3"),
     lambda sides, _: ("ranks_per_host", uneven(sides))),
    ("nvlink-domain-split", ("32766", "7"),
     lambda sides, _: ("mnnvl", rack(*(
         tray(node, clique=(32766, 7)[side]) for node, side in enumerate(sides))))),
    ("pkey-differs", ("0x8012", "0x8013"), partition),
    ("kernel-settings-differ", ("6.8.0-40-generic", "6.8.0-41-generic"),
     lambda sides, _: of_hosts("kernel_settings", sides, *(
         {"kernel": f"6.8.0-4{side}-generic"} for side in (0, 1)))),
    ("rail-order-differs", ("10.0.0.0/24, 10.0.1.0/24", "10.0.1.0/24, 10.0.0.0/24"),
     nets(test_check_rails.NETS[:2], test_check_rails.NETS[1::-1])),
    ("rail-slots-differ", ("0000:3b:00.0", "0000:3c:00.0"), of_rails(slots)),
    ("rdma-fabric-differs", ("InfiniBand", "Ethernet"),
     fabric({}, {"layer": "Ethernet", "gids": fabrics.roce_gids()})),
    ("rdma-firmware-differs", ("28.39.1002", "28.40.0001"), fabric({}, {"firmware": "28.40.0001"})),
    ("rdma-mixed", ("infiniband", "sockets"), roads),
    ("rdma-names-differ", ("mlx5_0:1", "mlx5_7:1"),
     nets(("10.0.0.0/24",), ("10.0.0.0/24",), names=((0,), (7,)))),
    ("rdma-mtu-differs", ("4096", "1024"), fabric(ROCE, {**ROCE, "mtu": 1500})),
    ("rdma-rate-differs", ("400 Gb/sec", "100 Gb/sec"),
     fabric({}, {"rate": "100 Gb/sec (4X EDR)"})),
    ("roce-gid-differs", ("RoCE v2 over IPv4", "RoCE v1 over IPv6"), gids),
    ("seed-differs", ("a", "b"), random_numbers),
    ("version-differs", ("2.13.0", "2.12.1"), software),
    ("world-size-differs", ("8", "16"),
     lambda sides, _: ("ranks", told(sides, world_size=(8, 16)))),
]  # fmt: skip


def uneven(sides: Sides) -> Cluster:
    """Hosts with two or three ranks."""
    sizes = [2 + side for side in sides]
    cluster = make_cluster(names_of(sides), 3)
    for rank in cluster.ranks:
        launch = {"local_world_size": sizes[rank.host.id], "world_size": sum(sizes)}
        cluster = change_rank(cluster, rank.seat, launch=launch)
    kept = [rank for rank in cluster.ranks if (rank.local_rank or 0) < sizes[rank.host.id]]
    return replace(cluster, ranks=tuple(kept), world_size=sum(sizes))


def lines(finding: Finding) -> Iterator[str]:
    """The clauses of a finding, and the entries of its evidence with all keys above them."""
    yield from finding.message.split("; ")
    yield from entries(finding.evidence)


def entries(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from entries(inner, f"{path} {key}")
    elif isinstance(value, (list, tuple)) and not any(isinstance(v, (dict, list)) for v in value):
        yield f"{path} {', '.join(map(str, value))}"
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from entries(inner, path)
    else:
        yield from (f"{path} {part}" for part in str(value).split("; "))


def untold(found: Sequence[Finding], sides: Sides, values: tuple[str, str]) -> list[str]:
    """Hosts that no line names together with their value."""
    said = [line for finding in found for line in lines(finding)]
    return [
        f"nd{number} has {values[side]}"
        for number, side in enumerate(sides)
        if not any(_names(line, f"nd{number}", values[side]) for line in said)
    ]


def _names(line: str, host: str, value: str) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(word)}", line) for word in (f"{host}", value))


@each_row(
    ("code", "values", "make", "sides"),
    [(*case, sides) for case in CASES for sides in (TWO, THREE)],
)
def test_a_difference_names_each_value_with_its_hosts(
    code: str, values: tuple[str, str], make: Make, sides: Sides, tmp_path: Path
) -> None:
    check, cluster = make(sides, Path(mkdtemp(dir=tmp_path)))
    every = list(CHECKS[check].judge(cluster))
    found = [each for each in every if each.code == code]
    assert found, every
    assert all(each.where.hosts for each in found), found
    assert untold(found, sides, values) == [], [list(lines(each)) for each in found]


_SOUNDS_LIKE_ONE = re.compile(r"differ|mixed|mismatch|split|disagree|skew")


def test_every_kind_that_sounds_like_a_difference_is_tried_or_excepted() -> None:
    kinds = registry.load().kinds.items()
    like = {
        code
        for code, (kind, _) in kinds
        if _SOUNDS_LIKE_ONE.search(code) or "differ" in kind.title.lower()
    }
    tried = {code for code, _, _ in CASES}
    assert like == tried | set(EXCEPTIONS)
    assert tried.isdisjoint(EXCEPTIONS)
