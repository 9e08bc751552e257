"""NVLink between hosts: domains, cliques and IMEX channels, on made-up racks and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.mnnvl import Mnnvl
from nccl_doctor.judge.conclusion import conclude
from tests.support.fabrics import write
from tests.support.findings import judge, only
from tests.support.gpu_states import cluster_of, in_fabric, state
from tests.support.observing import observe
from tests.support.racks import OTHER_RACK, RACK, may, rack, tray
from tests.support.reports import RUN

CHECK = Mnnvl()
NONE = may(channels=[])
FOLDER = "dev/nvidia-caps-imex-channels"


def of(node: int, **place: Any) -> dict[str, Any]:
    """A tray whose GPUs have another place in the fabric."""
    return tray(node, fabric=in_fabric(cluster_uuid=RACK, clique=32766, **place))


# Healthy racks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trays",
    [
        [tray(node) for node in range(18)],
        [tray(node) for node in range(16)]
        + [tray(node, OTHER_RACK, chassis="c2") for node in range(16, 18)],
        # One host is the rest of the job in the next rack.
        [tray(0), tray(1), tray(2), tray(3, OTHER_RACK, chassis="c2")],
        # Two chassis that are cabled as one domain (NVL36x2), and a machine that does not say.
        [tray(0), tray(1, chassis="c2"), tray(2, chassis=None)],
        [tray(0)],
    ],
    ids=["one rack", "two racks", "one host in the next rack", "two chassis", "one host"],
)
def test_healthy_racks_are_silent(trays: list[Any]) -> None:
    made = rack(*trays)
    assert judge(CHECK, made) == []
    assert judge(GpuState(), made) == []


def test_hosts_with_a_fabric_to_themselves_are_silent() -> None:
    h100 = [state(node) for node in range(4)]
    assert judge(CHECK, rack(*h100, settings=dict.fromkeys(range(4), NONE))) == []
    # Facts of an older version name no domain.
    for host in h100:
        for gpu in host["gpus"]:
            del gpu["fabric"]["cluster_uuid"], gpu["fabric"]["clique"], gpu["chassis"]
    assert judge(CHECK, rack(*h100, settings=dict.fromkeys(range(4), NONE))) == []
    assert judge(CHECK, cluster_of(*h100)) == []


# Channels -----------------------------------------------------------------------------------------


def test_the_host_without_a_channel_is_named() -> None:
    found = only(CHECK, rack(*map(tray, range(4)), settings={2: NONE}), "imex-channel-unusable",
                 hosts=["nd2"])  # fmt: skip
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert found.message == "no channel in /dev/nvidia-caps-imex-channels"
    assert "NCCL_MNNVL_ENABLE=0" in (found.fix or found.kind.fix)


def test_a_channel_that_may_not_be_opened_is_named_with_the_reason() -> None:
    closed = may(channels=[], refused={"channel0": "Operation not permitted"})
    found = only(CHECK, rack(tray(0), tray(1), settings={1: closed}), "imex-channel-unusable",
                 hosts=["nd1"])  # fmt: skip
    assert found.message == "/dev/nvidia-caps-imex-channels/channel0: Operation not permitted"
    assert "chmod 0666" in found.fix
    # One that it can open is enough.
    one = may(refused={"channel1": "Operation not permitted"})
    assert judge(CHECK, rack(tray(0), tray(1), settings={1: one})) == []


def test_nobody_has_a_channel() -> None:
    none = dict.fromkeys(range(3), NONE)
    found = judge(CHECK, rack(*map(tray, range(3)), settings=none))
    assert [one.where.hosts for one in found] == [("nd0",), ("nd1",), ("nd2",)]
    report = conclude(rack(*map(tray, range(3)), settings=none), [GpuState(), CHECK], run=RUN)
    assert report.exit_code == 1
    (folded,) = report.findings
    assert folded.code == "imex-channel-unusable"
    assert folded.where.hosts == ("nd0", "nd1", "nd2")


def without_channel(**fields: Any) -> Cluster:
    settings = fields.pop("settings", {1: NONE})
    trays = fields.pop("trays", [tray(0), tray(1)])
    return rack(*trays, settings=settings, **fields)


@pytest.mark.parametrize(
    "made",
    [
        without_channel(backend="gloo"),
        without_channel(trays=[tray(0)], settings={0: NONE}),
        without_channel(settings={1: {**NONE, "off": "NCCL_MNNVL_ENABLE=0"}}),
        # What the check could not look at is not missing.
        without_channel(settings={1: None}),
        # One GPU that is not registered, or a host outside: NCCL leaves it for the whole job.
        without_channel(trays=[of(0, state="IN_PROGRESS"), tray(1)]),
        without_channel(trays=[state(0), tray(1)]),
    ],
    ids=["gloo", "one host", "off", "not known", "not registered", "mixed with H100"],
)
def test_where_nccl_would_not_use_it_nobody_needs_a_channel(made: Cluster) -> None:
    assert judge(CHECK, made) == []


def test_alone_in_its_domain_a_host_needs_a_channel_for_its_own_gpus() -> None:
    apart = [tray(0), tray(1, OTHER_RACK, chassis="c2")]
    found = only(CHECK, without_channel(trays=apart), "imex-channel-unusable", hosts=["nd1"])
    assert found.level is Severity.FAIL


# Domains and cliques ------------------------------------------------------------------------------


def test_a_host_in_another_clique_than_its_domain() -> None:
    made = rack(tray(0), tray(1), tray(2, clique=7), tray(3))
    found = only(CHECK, made, "nvlink-domain-split", hosts=["nd2"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        f"hosts of NVLink domain {RACK}: 3 hosts in clique 32766, 1 host in clique 7"
    )


def test_partitions_are_worth_knowing_only() -> None:
    halves = rack(*(tray(node, clique=node // 2) for node in range(4)))
    found = only(CHECK, halves, "nvlink-domain-split", hosts=["nd0", "nd1", "nd2", "nd3"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    parts = rack(*(tray(node, clique=node // 4) for node in range(6)))
    found = only(CHECK, parts, "nvlink-domain-split", hosts=["nd4", "nd5"])
    assert found.level is Severity.INFO


def test_a_host_in_another_domain_than_its_chassis() -> None:
    made = rack(tray(0), tray(1, OTHER_RACK), tray(2), tray(3, OTHER_RACK, chassis="c2"))
    found = only(CHECK, made, "nvlink-domain-split", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert f"2 hosts in domain {RACK}, 1 host in domain {OTHER_RACK}" in found.message
    two = rack(tray(0), tray(1, OTHER_RACK))
    found = only(CHECK, two, "nvlink-domain-split", hosts=["nd0", "nd1"])
    assert found.confidence is Confidence.POSSIBLE


def test_one_gpu_of_a_host_in_another_clique() -> None:
    odd = tray(1)
    odd["gpus"][3]["fabric"] = in_fabric(cluster_uuid=RACK, clique=7)
    found = only(CHECK, rack(tray(0), odd, tray(2)), "nvlink-domain-split", hosts=["nd1"],
                 devices=["GPU-1-3"])  # fmt: skip
    assert found.level is Severity.WARN


def test_a_host_in_no_domain_keeps_nccl_from_it_everywhere() -> None:
    found = only(CHECK, rack(tray(0), tray(1), tray(2, None)), "nvlink-domain-split",
                 hosts=["nd2"])  # fmt: skip
    assert "NCCL then uses the network between all hosts" in found.message
    # Other GPUs have no place there, and where most are outside, it is meant so.
    assert judge(CHECK, rack(tray(0), tray(1), state(2))) == []
    assert judge(CHECK, rack(tray(0), tray(1, None), tray(2, None))) == []


def test_a_gpu_that_is_not_registered_is_for_gpu_state_alone() -> None:
    made = rack(tray(0), of(1, state="IN_PROGRESS"), tray(2))
    assert judge(CHECK, made) == []
    found = judge(GpuState(), made)
    assert {(one.code, one.where.hosts) for one in found} == {("fabric-manager-down", ("nd1",))}
    assert all("NMX-C" in one.fix for one in found)


@pytest.mark.parametrize(
    "changes", [{"clique": "5"}, {"off": "NCCL_MNNVL_ENABLE=0"}], ids=["told", "off"]
)
def test_where_nccl_is_told_otherwise_cliques_are_not_compared(changes: dict[str, str]) -> None:
    trays = [tray(0), tray(1), tray(2, clique=7)]
    assert judge(CHECK, rack(*trays, settings={0: may(**changes)})) == []
    assert judge(CHECK, rack(*trays, backend="gloo")) == []


def test_a_lost_gpu_has_no_place() -> None:
    broken = tray(1)
    broken["gpus"][0] = {"index": 0, "lost": True, "refused": {"GPU_IS_LOST": ["handle"]}}
    assert judge(CHECK, rack(tray(0), broken)) == []
    found = only(CHECK, rack(tray(0), broken, settings={0: NONE}), "imex-channel-unusable",
                 hosts=["nd0"])  # fmt: skip
    assert found.level is Severity.FAIL


def test_the_domain_is_compared_with_other_runs() -> None:
    made = rack(tray(0), tray(1))
    figures = {figure.where.hosts: figure.value for figure in CHECK.figures(made)}
    assert figures[("nd1",)] == f"clique 32766 of NVLink domain {RACK}"
    assert list(CHECK.figures(rack(state(0), state(1)))) == []


# Observing ----------------------------------------------------------------------------------------


def test_channels_and_settings_of_a_machine(tmp_path: Path) -> None:
    write(tmp_path, "dev/nvidia0", "")
    write(tmp_path, f"{FOLDER}/channel0", "")
    write(tmp_path, f"{FOLDER}/channel12/none", "")  # what cannot be opened for writing
    write(tmp_path, f"{FOLDER}/other", "")
    seen = observe(Mnnvl, {"NCCL_MNNVL_UUID": "-1", "NCCL_MNNVL_CLIQUE_ID": "-2"}, root=tmp_path)
    assert seen == {
        "channels": ["channel0"],
        "refused": {"channel12": "Is a directory"},
        "off": "",
        "cluster_uuid": "",
        "clique": "-2",
    }


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("NCCL_MNNVL_ENABLE", "0", True),
        ("NCCL_MNNVL_ENABLE", "1", False),
        ("NCCL_MNNVL_ENABLE", "2", False),
        ("NCCL_CUMEM_ENABLE", "0", True),
        ("NCCL_CUMEM_ENABLE", "1", False),
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_LEVEL", "LOC", True),
        ("NCCL_P2P_LEVEL", "NVL", False),
    ],
)
def test_settings_that_keep_nccl_from_it(tmp_path: Path, name: str, value: str, off: bool) -> None:
    write(tmp_path, "dev/nvidia0", "")
    seen = observe(Mnnvl, {name: value}, root=tmp_path)
    assert seen["off"] == (f"{name}={value}" if off else "")
    assert seen["channels"] == []


def test_without_gpus_there_is_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU"):
        observe(Mnnvl, root=tmp_path)
