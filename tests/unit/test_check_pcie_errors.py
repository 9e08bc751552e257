"""PCIe error counters of made-up hosts, read once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.pcie_errors import PcieErrors
from nccl_doctor.toolkit.pcie_errors import pcie_errors
from tests.support import fabrics, hardware
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.hardware import GPU, GPU_PORT, NIC, NIC_PORT, ROOT_PORT
from tests.support.observing import observe

CHECK = PcieErrors()
Facts = dict[str, Any]


def seen(root: Path) -> Facts:
    return observe(PcieErrors, root=root)


def cluster(*hosts: Facts) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    by_host = dict(zip(names, hosts, strict=True))
    return make_cluster(names, nproc=1, check="pcie_errors", by_host=by_host)


@pytest.fixture
def healthy(tmp_path: Path) -> Facts:
    return seen(hardware.pcie(tmp_path / "healthy"))


def test_every_device_and_the_ports_above_it(healthy: Facts) -> None:
    devices = healthy["devices"]
    ports = {GPU: GPU_PORT, NIC: NIC_PORT, GPU_PORT: ROOT_PORT, NIC_PORT: ROOT_PORT, ROOT_PORT: ""}
    assert {address: device["port"] for address, device in devices.items()} == ports
    assert devices[GPU]["kind"] == "GPU"
    assert devices[NIC]["kind"] == "network card"
    assert devices[ROOT_PORT]["kind"] == "PCIe port"
    assert devices[GPU]["model"] == "0x10de:0x2330"
    assert devices[GPU]["correctable"] == {}
    assert judge(CHECK, cluster(healthy, healthy)) == []


def test_fatal_errors_are_worth_knowing(tmp_path: Path, healthy: Facts) -> None:
    root = hardware.pcie(tmp_path)
    hardware.count(root, GPU_PORT, "fatal", SDES=1, DLP=2)
    made = cluster(healthy, seen(root), healthy)
    found = only(CHECK, made, "pcie-errors", hosts=["nd1"], devices=[GPU_PORT])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.CERTAIN)
    assert found.message == (
        f"PCIe port {GPU_PORT}, since the kernel found it: fatal DLP 2, SDES 1"
    )


def test_what_most_of_a_model_have_is_no_news(tmp_path: Path, healthy: Facts) -> None:
    root = hardware.pcie(tmp_path)
    hardware.count(root, GPU, "fatal", SDES=1)
    reset = seen(root)
    assert judge(CHECK, cluster(reset, reset, reset, healthy)) == []
    only(CHECK, cluster(reset), "pcie-errors", hosts=["nd0"], devices=[GPU])


def test_one_that_stands_out_among_its_like(tmp_path: Path, healthy: Facts) -> None:
    root = hardware.pcie(tmp_path)
    hardware.count(root, NIC, "correctable", RxErr=90, BadTLP=30)
    sick = seen(root)
    made = cluster(healthy, healthy, sick, healthy)
    found = only(CHECK, made, "pcie-errors", hosts=["nd2"], devices=[NIC])
    assert found.level is Severity.INFO
    assert (
        "120 correctable errors of its link; the median of other devices of its model is 0"
        in found.message
    )
    assert judge(CHECK, cluster(sick, sick, sick, sick)) == []  # old machines, all of them
    assert judge(CHECK, cluster(healthy, healthy, sick)) == []  # too few to compare with


@pytest.mark.parametrize("errors", [{"RxErr": 99}, {"NonFatalErr": 5000, "HeaderOF": 5000}])
def test_a_few_and_those_of_no_link_are_silent(
    tmp_path: Path, healthy: Facts, errors: dict[str, int]
) -> None:
    root = hardware.pcie(tmp_path)
    hardware.count(root, NIC, "correctable", **errors)
    assert judge(CHECK, cluster(healthy, healthy, healthy, seen(root))) == []


def test_names_of_older_kernels_hold_spaces(tmp_path: Path) -> None:
    root = hardware.pcie(tmp_path)
    file = f"sys/bus/pci/devices/{GPU}/aer_dev_correctable"
    fabrics.write(
        root, file, "Receiver Error 2\nBad TLP 0\nReplay Timer Timeout 7\nTOTAL_ERR_COR 9"
    )
    counted = seen(root)["devices"][GPU]["correctable"]
    assert counted == {"Receiver Error": 2, "Replay Timer Timeout": 7}


def test_what_cannot_be_read_line_by_line_is_left_out(tmp_path: Path) -> None:
    root = hardware.pcie(tmp_path)
    file = f"sys/bus/pci/devices/{GPU}/aer_dev_fatal"
    fabrics.write(root, file, "SDES\n\n12\nDLP many\nTLP -1\nECRC 3")
    assert seen(root)["devices"][GPU]["fatal"] == {"ECRC": 3}


def test_where_nobody_counts_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no GPU and no network card"):
        seen(tmp_path / "nothing")
    with pytest.raises(Skip, match="shows no counters"):
        seen(hardware.pcie(tmp_path / "old", counts=False))
    with pytest.raises(Skip, match="the firmware handles"):
        seen(hardware.pcie(tmp_path / "firmware", native=False))
    with pytest.raises(Skip, match="virtual machine"):
        seen(hardware.pcie(tmp_path / "guest", virtual=True))


def test_what_the_firmware_passed_on_is_known_all_the_same(tmp_path: Path) -> None:
    root = hardware.pcie(tmp_path, native=False)
    hardware.count(root, GPU, "fatal", SDES=1)
    facts = seen(root)
    assert list(facts["devices"]) == [GPU]
    only(CHECK, cluster(facts), "pcie-errors", hosts=["nd0"], devices=[GPU])


def test_virtual_functions_and_other_devices_are_left_out(tmp_path: Path) -> None:
    root = hardware.pcie(tmp_path)
    fabrics.link(root, f"sys/bus/pci/devices/{NIC}/physfn", "sys/devices/pci0000:00/pf")
    fabrics.write(root, f"sys/bus/pci/devices/{GPU}/vendor", "0x1a03")  # of a BMC
    assert pcie_errors(root) == {
        "devices": {},
        "why_not": "no GPU and no network card on a PCI bus here",
    }


def test_a_device_that_goes_away_meanwhile_costs_nothing(tmp_path: Path) -> None:
    root = hardware.pcie(tmp_path)
    shutil.rmtree((root / f"sys/bus/pci/devices/{GPU}").resolve())
    assert GPU not in seen(root)["devices"]
