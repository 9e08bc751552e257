"""Calls that the kernel refuses, on made-up hosts and on this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Finding, Layer, Severity, Where
from nccl_doctor.checks.kernel_access import KernelAccess
from nccl_doctor.judge.causes import explain, root_causes
from nccl_doctor.model.job import Job
from nccl_doctor.toolkit.groups.kinds import INIT_FAILED
from tests.support import fabrics
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.fixes import in_full
from tests.support.observing import observe
from tests.support.rows import each_row

CHECK = KernelAccess()
FINE: dict[str, Any] = {
    "netlink": None,
    "processes": None,
    "proc_net": True,
    "expandable": False,
    "guards": [],
    "container": "",
    "line": "netlink allowed, …",
}


def cluster(backend: str = "nccl", job: Job | None = None, **fields: Any) -> Cluster:
    seen = {"nd0": FINE, "nd1": {**FINE, **fields}, "nd2": FINE}
    made = {"check": "kernel_access", "by_host": seen, "backend": backend}
    return make_cluster(list(seen), **made, job=job or Job())


@each_row(
    "fields",
    [
        {},
        {"guards": ["seccomp", "AppArmor docker-default (enforce)", "Yama 1"], "proc_net": False},
        {"processes": "EPERM", "guards": ["Yama 1"]},  # Ubuntu's default, and nobody needs it
        {"expandable": True},
    ],
)
def test_guards_that_refuse_nothing_that_is_needed(fields: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(**fields)) == []


@each_row(
    ("refused", "guards", "container", "fix"),
    [
        ("EPERM", ["seccomp"], "docker", "docker run --security-opt seccomp=unconfined"),
        ("EPERM", ["seccomp"], "kubernetes", "seccompProfile: {type: Unconfined}"),
        (
            "EACCES",
            ["seccomp", "AppArmor docker-strict (enforce)"],
            "docker",
            "docker run --security-opt apparmor=unconfined",
        ),
        (
            "EACCES",
            ["AppArmor train (enforce)"],
            "",
            "'network netlink raw,' was added to it, the profile train",
        ),
        ("EACCES", ["SELinux container_t"], "podman", "podman run --security-opt label=disable"),
        ("EACCES", ["SELinux train_t"], "", "audit2allow"),
        ("EAFNOSUPPORT", ["seccomp", "no_new_privs"], "", "AF_NETLINK to RestrictAddressFamilies="),
        ("EACCES", ["gVisor"], "docker", "docker run --security-opt"),
    ],
)
def test_no_netlink_no_job(refused: str, guards: list[str], container: str, fix: str) -> None:
    for backend in ("nccl", "gloo"):
        made = cluster(backend, netlink=refused, guards=guards, container=container)
        found = only(CHECK, made, "netlink-refused", hosts=["nd1"])
        assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
        assert found.message.startswith(f"getifaddrs: {refused} (")
        assert fix in found.fix


def test_it_explains_why_no_group_is_formed() -> None:
    made = cluster("gloo", netlink="EACCES")
    failed = Finding(INIT_FAILED, "Permission denied", Where(hosts=("nd1",), ranks=(2, 3)))
    roots = root_causes(explain([*judge(CHECK, made), failed], made))
    assert [found.code for found in roots] == ["netlink-refused"]
    assert roots[0].kind.layer is Layer.HOST


@each_row(
    ("guards", "container", "fix"),
    [
        (["seccomp"], "docker", "docker run --cap-add=SYS_PTRACE; or take expandable_segments"),
        (["seccomp"], "kubernetes", "capabilities: {add: [SYS_PTRACE]}"),
        (["Yama 1"], "", "sysctl -w kernel.yama.ptrace_scope=0 (as root); or "),
        (["gVisor"], "", "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_tensors_that_cannot_be_handed_over(guards: list[str], container: str, fix: str) -> None:
    seen = {"processes": "EPERM", "expandable": True, "guards": guards, "container": container}
    found = only(CHECK, cluster(**seen), "process-access-refused", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert fix in in_full(found.fix)
    job = Job(groups="weight-sync")
    found = only(CHECK, cluster(job=job, **seen), "process-access-refused", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert judge(CHECK, cluster("gloo", **seen)) == []  # without CUDA there are no such tensors


def test_the_guards_of_a_host(tmp_path: Path) -> None:
    for name, text in {
        "proc/version": "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016",
        "proc/self/status": "Name:\tpython\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1",
        "proc/self/attr/current": "docker-default (enforce)\n",
        "proc/sys/kernel/yama/ptrace_scope": "1",
        "proc/net/tcp": "  sl  local_address rem_address",
        ".dockerenv": "",
    }.items():
        fabrics.write(tmp_path, name, text)
    env = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    found = observe(KernelAccess, env, root=tmp_path)
    guards = ["gVisor", "seccomp", "no_new_privs", "AppArmor docker-default (enforce)", "Yama 1"]
    assert found["guards"] == guards
    assert (found["expandable"], found["container"], found["proc_net"]) == (True, "docker", True)
    assert found["line"].endswith(f"/proc/net readable; guards: {', '.join(guards)}")


@each_row(
    ("label", "guards"),
    [
        ("system_u:system_r:container_t:s0:c12,c345", ["SELinux container_t"]),
        ("unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023", []),
        ("unconfined", []),
        ("", []),
    ],
)
def test_labels(tmp_path: Path, label: str, guards: list[str]) -> None:
    fabrics.write(tmp_path, "proc/self/attr/current", label + "\0")
    found = observe(KernelAccess, root=tmp_path)
    assert found["guards"] == guards
    assert not found["proc_net"]


def test_this_host() -> None:
    found = observe(KernelAccess)
    assert found["netlink"] is None
    assert found["processes"] in (None, "EPERM", "ENOSYS")
    assert "netlink allowed" in found["line"]
