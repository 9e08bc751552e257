"""NVIDIA's IMEX service on made-up racks, and what is read of it on made-up machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Confidence, Severity, Skip, Untested
from nccl_doctor.checks.imex_service import ImexService
from tests.support.fabrics import write
from tests.support.findings import judge, only
from tests.support.gpu_states import state
from tests.support.observing import observe
from tests.support.racks import OTHER_RACK, address, may, rack, serves, tray

CHECK = ImexService()
STOPPED = {"running": False, "file": "", "nodes": None}
TRAYS = [tray(node) for node in range(4)]
NODES = "etc/nvidia-imex/nodes_config.cfg"
CONFIG = "etc/nvidia-imex/config.cfg"


# Rules --------------------------------------------------------------------------------------------


def test_healthy_racks_are_silent() -> None:
    assert judge(CHECK, rack(*TRAYS)) == []
    # A list of the whole rack, in any order, of which the job has a part.
    lists = {node: serves(*reversed(range(18))) for node in range(2)}
    assert judge(CHECK, rack(*TRAYS[:2], services=lists)) == []
    # Each rack has its own.
    racks = [*TRAYS[:2], *(tray(node, OTHER_RACK, chassis="c2") for node in (2, 3))]
    lists = {0: serves(0, 1), 1: serves(0, 1), 2: serves(2, 3), 3: serves(2, 3)}
    assert judge(CHECK, rack(*racks, services=lists)) == []
    # In a pod or a container nothing is known.
    assert judge(CHECK, rack(*TRAYS, services=dict.fromkeys(range(4)))) == []
    unseen = {node: serves(nodes=None) for node in range(4)}
    assert judge(CHECK, rack(*TRAYS, services=unseen)) == []


def test_hosts_that_share_no_domain_need_no_service() -> None:
    stopped = dict.fromkeys(range(2), STOPPED)
    assert judge(CHECK, rack(state(0), state(1), services=stopped)) == []
    assert judge(CHECK, rack(*TRAYS[:2], services=stopped, backend="gloo")) == []
    assert judge(CHECK, rack(tray(0), services=stopped)) == []
    apart = [tray(0), tray(1, OTHER_RACK, chassis="c2")]
    assert judge(CHECK, rack(*apart, services=stopped)) == []
    off = dict.fromkeys(range(2), may(off="NCCL_MNNVL_ENABLE=0"))
    assert judge(CHECK, rack(*TRAYS[:2], services=stopped, settings=off)) == []


def test_the_host_without_a_service_is_named() -> None:
    found = only(CHECK, rack(*TRAYS, services={3: STOPPED}), "imex-not-running", hosts=["nd3"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)


def test_the_host_whose_list_differs_is_named() -> None:
    odd = serves(0, 1, 2, 40)
    found = only(CHECK, rack(*TRAYS, services={1: odd}), "imex-nodes-differ", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert found.message == (
        "/etc/nvidia-imex/nodes_config.cfg lacks 192.168.77.4 and has also 192.168.77.41, compared "
        "with the other hosts"
    )
    # That it is not in its own list, either, is one fault.
    only(CHECK, rack(*TRAYS, services={3: serves(40)}), "imex-nodes-differ", hosts=["nd3"])


def test_two_lists_that_equally_many_have() -> None:
    lists = {0: serves(0, 1), 1: serves(0, 1), 2: serves(2, 3), 3: serves(2, 3)}
    found = only(CHECK, rack(*TRAYS, services=lists), "imex-nodes-differ",
                 hosts=["nd0", "nd1", "nd2", "nd3"])  # fmt: skip
    assert found.message == "2 different lists, equally many hosts have each"


def test_a_host_that_nobody_lists_is_named() -> None:
    lists = {node: serves(0, 1, 2) for node in range(4)}
    found = only(CHECK, rack(*TRAYS, services=lists), "imex-host-missing", hosts=["nd3"])
    assert found.message == "none of its addresses (192.168.77.4) is among the 3 in the list"
    assert found.level is Severity.FAIL
    # Its own service is another matter.
    lists[3] = serves(nodes=None)
    only(CHECK, rack(*TRAYS, services=lists), "imex-host-missing", hosts=["nd3"])


def test_a_list_of_names_is_not_searched() -> None:
    names = {node: serves(nodes=["tray-a.rack1", "TRAY-B", address(2)]) for node in range(4)}
    assert judge(CHECK, rack(*TRAYS, services=names)) == []
    # But two spellings of one list are one list.
    names[1] = serves(nodes=["tray-b.rack1", "tray-a", address(2)])
    assert judge(CHECK, rack(*TRAYS, services=names)) == []


# Observing ----------------------------------------------------------------------------------------


def process(root: Path, pid: int, name: str, *words: str, group: str = "/system.slice/x") -> None:
    write(root, f"proc/{pid}/comm", f"{name}\n")
    write(root, f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in (name, *words)))
    write(root, f"proc/{pid}/cgroup", f"0::{group}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a GPU, on which all processes can be seen."""
    write(tmp_path, "dev/nvidia0", "")
    process(tmp_path, 2, "kthreadd")
    return tmp_path


def seen(root: Path, **env: str) -> dict[str, Any]:
    return observe(ImexService, env, root=root)


def test_the_list_of_the_service(root: Path) -> None:
    process(root, 77, "nvidia-imex", "-c", f"/{CONFIG}")
    write(root, CONFIG, f"# IMEX_NODE_CONFIG_FILE=/none\nIMEX_NODE_CONFIG_FILE=/{NODES}\nLOG=4\n")
    write(root, NODES, "# the rack\n10.0.0.1\n\n 10.0.0.2   # tray 2\nfd00::3\n")
    assert seen(root) == {
        "running": True,
        "file": f"/{NODES}",
        "nodes": ["10.0.0.1", "10.0.0.2", "fd00::3"],
    }


def test_the_service_is_told_of_another_file(root: Path) -> None:
    process(root, 77, "nvidia-imex", "-c", "/shared/imex/config_q1.cfg")
    write(root, "shared/imex/config_q1.cfg", "IMEX_NODE_CONFIG_FILE=/shared/imex/nodes.cfg\n")
    write(root, "shared/imex/nodes.cfg", "10.0.0.9\n")
    assert (seen(root)["file"], seen(root)["nodes"]) == ("/shared/imex/nodes.cfg", ["10.0.0.9"])


def test_without_a_configuration_the_default_holds(root: Path) -> None:
    process(root, 77, "nvidia-imex")
    write(root, NODES, "10.0.0.1\n")
    assert seen(root)["nodes"] == ["10.0.0.1"]


def test_no_service_runs(root: Path) -> None:
    write(root, NODES, "10.0.0.1\n")
    assert seen(root) == STOPPED


def test_a_list_that_cannot_be_read_is_no_pass(root: Path) -> None:
    process(root, 77, "nvidia-imex")
    with pytest.raises(Untested, match="the list of hosts of IMEX, cannot be read") as raised:
        seen(root)
    assert raised.value.facts == serves(nodes=None)


def test_a_service_in_a_container_has_a_list_of_its_own(root: Path) -> None:
    process(root, 77, "nvidia-imex", group="/system.slice/docker-0123.scope")
    write(root, NODES, "10.0.0.1\n")
    assert seen(root) == {"running": True, "file": "", "nodes": None}


# The service of the host is not blamed where another one runs -------------------------------------


def test_in_a_pod_it_is_not_looked_for(root: Path) -> None:
    with pytest.raises(Skip, match="in a pod"):
        seen(root, KUBERNETES_SERVICE_HOST="10.96.0.1")


def test_where_the_dra_driver_is_installed(root: Path) -> None:
    write(root, "var/lib/kubelet/plugins/compute-domain.nvidia.com/dra.sock", "")
    with pytest.raises(Skip, match="DRA driver runs IMEX on this host"):
        seen(root)


def test_where_the_daemon_of_the_dra_driver_is_seen(root: Path) -> None:
    group = "/kubepods.slice/kubepods-besteffort.slice/cri-containerd-01.scope"
    process(root, 77, "nvidia-imex", "-c", "/imexd/imexd.cfg", group=group)
    write(root, NODES, "10.0.0.1\n")
    with pytest.raises(Skip, match="DRA driver runs IMEX on this host"):
        seen(root)


def test_a_node_of_kubernetes_without_a_service(root: Path) -> None:
    process(root, 50, "kubelet")
    with pytest.raises(Skip, match="a node of Kubernetes"):
        seen(root)
    # One that runs on the host itself is the host's.
    process(root, 77, "nvidia-imex")
    write(root, NODES, "10.0.0.1\n")
    assert seen(root)["nodes"] == ["10.0.0.1"]


def test_slurm_may_start_it_for_each_job(root: Path) -> None:
    process(root, 60, "slurmd")
    with pytest.raises(Skip, match="outside of a Slurm job"):
        seen(root)
    assert seen(root, SLURM_JOB_ID="7") == STOPPED


def test_a_container_that_hides_the_processes(root: Path) -> None:
    (root / "proc/2/comm").write_text("bash\n")
    with pytest.raises(Skip, match="cannot be seen from this container"):
        seen(root)


def test_without_gpus_there_is_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU"):
        observe(ImexService, root=tmp_path)
