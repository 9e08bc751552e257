"""The queue of connections and the range of ports, against the size of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity, Untested
from nccl_doctor.checks.kernel_limits import KernelLimits
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = KernelLimits()
FINE: dict[str, Any] = {
    "somaxconn": 4096,
    "abort_on_overflow": False,
    "range": [32768, 60999],
    "taken": 20,
    "time_wait": 0,
    "reserved": 0,
    "local_ranks": 8,
}


def cluster(world: int = 16, bad: str = "nd1", **fields: Any) -> Cluster:
    seen = dict.fromkeys(("nd0", "nd1", "nd2"), FINE)
    seen[bad] = {**FINE, **fields}
    return make_cluster(list(seen), check="kernel_limits", by_host=seen, world_size=world)


def test_defaults_are_fine() -> None:
    assert judge(CHECK, cluster()) == []
    assert judge(CHECK, cluster(world=4096)) == []
    assert judge(CHECK, cluster(range=None, somaxconn=None)) == []


def test_a_short_queue_counts_on_the_master() -> None:
    assert judge(CHECK, cluster(world=512, somaxconn=128)) == []
    made = cluster(world=512, bad="nd0", somaxconn=128, abort_on_overflow=True)
    found = only(CHECK, made, "listen-backlog-low", hosts=["nd0"])
    assert found.level is Severity.WARN
    assert found.message == (
        "net.core.somaxconn=128 for 512 ranks, and a full queue resets connections"
    )


@pytest.mark.parametrize(
    ("fields", "severity", "message"),
    [
        ({"range": [50000, 50099]}, Severity.WARN, "80 of 100 ports (50000–50099)"),
        ({"range": [50000, 50039]}, Severity.FAIL, "20 of 40 ports (50000–50039)"),
        ({"reserved": 28200}, Severity.FAIL, "12 of 32 ports"),
        # They come back within a minute.
        (
            {"taken": 28230, "time_wait": 28000},
            Severity.WARN,
            "left for 8 ranks, 28000 in TIME_WAIT",
        ),
    ],
)
def test_ports_run_out(fields: dict[str, Any], severity: Severity, message: str) -> None:
    found = only(CHECK, cluster(**fields), "ports-exhausted", hosts=["nd1"])
    assert found.level is severity
    assert message in found.message
    assert "ip_local_port_range" in found.fix
    widest = cluster(**{"taken": 64500, **fields, "range": [1024, 65535]})
    for found in judge(CHECK, widest):
        assert "ip_local_port_range" not in found.fix


@pytest.mark.parametrize(
    ("reserved", "kept"), [("", "29500"), ("22,9000-9100", "22,9000-9100,29500")]
)
def test_a_wider_range_leaves_the_port_of_the_job_out(reserved: str, kept: str) -> None:
    made = cluster(range=[50000, 50099], reserved_ports=reserved)
    found = only(CHECK, made, "ports-exhausted", hosts=["nd1"])
    assert found.fix == (
        'sysctl -w net.ipv4.ip_local_port_range="1024 65535" '
        f"net.ipv4.ip_local_reserved_ports={kept}"
    )
    (step,) = found.fix.steps
    assert step.undo == (
        'sysctl -w net.ipv4.ip_local_port_range="50000 50099" '
        f'net.ipv4.ip_local_reserved_ports="{reserved}"'
    )


_ROW = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0"


def proc(root: Path, **settings: str) -> Path:
    for name, text in settings.items():
        path = root / "sys/net" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "net").mkdir(parents=True)
    rows = [(50001, "0A"), (50001, "01"), (50002, "06"), (50001, "06"), (80, "0A")]
    lines = [_ROW.format(port=port, state=state) for port, state in rows]
    (root / "net/tcp").write_text("\n".join(["  sl  local_address rem_address", *lines]))
    return root


def test_reading(tmp_path: Path) -> None:
    context = Context(launch=Launch(local_world_size=8), env={}, root=tmp_path)
    with pytest.raises(Untested):
        CHECK.observe(context)
    proc(
        tmp_path / "proc",
        core__somaxconn="128\n",
        ipv4__tcp_abort_on_overflow="1\n",
        ipv4__ip_local_port_range="50000\t50009\n",
        ipv4__ip_local_reserved_ports="22,50009-50020,50005\n",
    )
    assert CHECK.observe(context) == {
        "somaxconn": 128,
        "abort_on_overflow": True,
        "range": [50000, 50009],
        "taken": 2,
        "time_wait": 1,
        "reserved": 2,
        "reserved_ports": "22,50009-50020,50005",
        "local_ranks": 8,
        "tcp": {},
    }


def test_this_machine() -> None:
    seen = CHECK.observe(Context(launch=Launch(), env={}))
    assert seen["taken"] <= seen["range"][1] - seen["range"][0] + 1
