"""Xids and SXids in kernel logs as they are written, and what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.api import Severity
from nccl_doctor.checks.gpu_state import kernel_log
from nccl_doctor.toolkit.gpu import xid

FELL = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus."


def log(root: Path, name: str, *lines: str) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("".join(f"{line}\n" for line in lines))
    return root


def test_the_ring_buffer_tells_how_long_ago(tmp_path: Path) -> None:
    again = FELL.replace("79", "31")
    root = log(
        tmp_path,
        "dev/kmsg",
        "6,1,100,-;Linux version 6.1",
        f"4,900,1000000,-;{again}",
        f"4,901,2000000,-;{FELL}",
        f"4,902,3000000,-,caller=T1;{again}",
        " SUBSYSTEM=pci",
    )
    seen = kernel_log.read_kernel_log(root)
    assert seen["source"] == "/dev/kmsg"
    assert [(one["bus"], one["xid"], one["count"]) for one in seen["xids"]] == [
        ("0000:1b:00", 31, 2),
        ("0000:1b:00", 79, 1),
    ]
    first, second = seen["xids"]
    assert first["age_s"] == second["age_s"] - 1  # the last of each counts
    assert "fallen off the bus" in second["text"]


@pytest.mark.parametrize(
    ("written", "bus"),
    [
        ("PCI:0000:1b:00", "0000:1b:00"),
        ("PCI:0000:1B:00.0", "0000:1b:00"),
        ("PCI:00000000:1b:00", "0000:1b:00"),
        ("PCI:000a:1b:00", "000a:1b:00"),
        ("0000:1b:00", "0000:1b:00"),
        ("PCI:1b:00", "0000:1b:00"),
    ],
)
def test_every_way_to_write_a_bus(tmp_path: Path, written: str, bus: str) -> None:
    (seen,) = kernel_log.read_kernel_log(
        log(tmp_path, "dev/kmsg", f"NVRM: Xid ({written}): 48, x")
    )["xids"]
    assert (seen["bus"], seen["xid"], seen["age_s"]) == (bus, 48, None)


@pytest.mark.parametrize("part", ["GPU-I:05", "GPU-I:05 GPU-CI:00"])
def test_an_xid_of_a_mig_instance_is_one_of_its_gpu(tmp_path: Path, part: str) -> None:
    line = f"NVRM: Xid (PCI:0000:01:00 {part}): 94, pid=7, name=python, Contained: SM"
    (seen,) = kernel_log.read_kernel_log(log(tmp_path, "dev/kmsg", line))["xids"]
    assert (seen["bus"], seen["xid"]) == ("0000:01:00", 94)
    assert seen["text"] == f"{part}, pid=7, name=python, Contained: SM"


def test_a_log_file_counts_from_the_last_start(tmp_path: Path) -> None:
    root = log(
        tmp_path,
        "var/log/messages",
        f"Jan 15 14:00:00 nd0 kernel: {FELL}",
        "Jan 15 14:30:00 nd0 kernel: Linux version 6.1.0 (gcc)",
        f"Jan 15 14:30:45 nd0 kernel: [   12.5] {FELL.replace('79', '94')}",
    )
    seen = kernel_log.read_kernel_log(root)
    assert seen["source"] == "/var/log/messages"
    assert [one["xid"] for one in seen["xids"]] == [94]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    seen = kernel_log.read_kernel_log(tmp_path)
    assert (seen["source"], seen["xids"], seen["sxids"]) == (None, [], [])
    assert "/dev/kmsg: No such file" in seen["reason"]
    assert "/var/log/kern.log" in seen["reason"]


def test_garbage_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_bytes(
        b"\xff\xfe\n4,x;NVRM: Xid (PCI:zz): 9\nNVRM: Xid (7): 9\n"
        b"nvidia-nvswitchX: SXid (PCI:0000:c1:00.0): garbled, Fatal\n" * 50
    )
    seen = kernel_log.read_kernel_log(tmp_path)
    assert (seen["xids"], seen["sxids"]) == ([], [])


def test_ten_thousand_of_one_are_one(tmp_path: Path) -> None:
    (seen,) = kernel_log.read_kernel_log(log(tmp_path, "dev/kmsg", *[FELL] * 10_000))["xids"]
    assert seen["count"] == 10_000


def test_the_errors_of_nvswitches_are_read_line_by_line(tmp_path: Path) -> None:
    root = log(
        tmp_path,
        "dev/kmsg",
        "3,1,100,-;nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress "
        "non-posted PRIV error (First)",
        "3,2,100,-;nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Severity 0 Engine instance 44",
        "3,3,100,-;nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Data {0x1c0, 0x00bd5c8a}",
        "3,4,100,-;nvidia-nvswitch0: SXid (PCI:0000:C3:00.0): 24007, Fatal, Link 30 sourcetrack "
        "timeout error",
        "3,5,100,-;nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 31 sourcetrack "
        "timeout error",
        "3,6,1,-;nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 11001, Fatal, ingress invalid command",
    )
    seen = kernel_log.read_kernel_log(root)
    assert seen["xids"] == []
    short = [(s["switch"], s["bus"], s["sxid"], s["fatal"], s["link"]) for s in seen["sxids"]]
    assert short == [
        (3, "0000:05:00.0", 12028, False, 32),
        (0, "0000:c3:00.0", 24007, True, 31),
        (0, "0000:c3:00.0", 11001, True, None),
    ]
    assert [s["count"] for s in seen["sxids"]] == [1, 2, 1]
    assert seen["sxids"][2]["text"] == "ingress invalid command"


@pytest.mark.parametrize(
    ("number", "text", "nothing"),
    [
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", True),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", False),
        (145, "RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)", True),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000)", False),
        (74, "Nonfatal", False),
    ],
)
def test_some_xids_say_that_nothing_is_to_be_done(number: int, text: str, nothing: bool) -> None:
    assert xid.asks_for_nothing({"xid": number, "text": text}) is nothing


def test_what_an_xid_means() -> None:
    lost, page_fault = xid.xid_of(79), xid.xid_of(31)
    assert lost is not None
    assert page_fault is not None
    assert (lost.severity, page_fault.severity) == (Severity.FAIL, Severity.INFO)
    assert "PCIe" in lost.means
    assert "power-cycle" in lost.fix
    assert xid.xid_of(9999) is None
    rows = xid._rows()
    assert {48, 63, 64, 74, 79, 94, 95, 119, 120, 140, 143} <= set(rows)
    # As NVIDIA's catalogue has them: a remapping that worked asks for nothing.
    assert rows[63].severity is Severity.INFO
    assert {number for number, row in rows.items() if row.severity is Severity.FAIL} == {
        46, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 158,
    }  # fmt: skip
    for row in rows.values():
        assert row.means == row.means.strip() != ""
        assert not row.means.endswith(".")
