"""Does the kernel refuse calls that NCCL, gloo or torch make on this host?

What it checks
--------------
Calls that security modules and sandboxes forbid (seccomp, AppArmor, SELinux, Yama, gVisor, and
RestrictAddressFamilies of systemd), by making them: getifaddrs, which asks the kernel over netlink;
pidfd_getfd on another process of this user, with a file number that no process has; and reading
/proc/net. The facts have one line of what is allowed, and what may forbid the rest.

Why it matters
--------------
NCCL and gloo list the interfaces of the host with getifaddrs, whatever NCCL_SOCKET_IFNAME and
GLOO_SOCKET_IFNAME say. Without netlink gloo stops with `Permission denied`, and NCCL with `no
socket interface found` or a system error. torch hands CUDA tensors of expandable segments to
another process by pidfd_getfd, and ends with `pidfd_getfd: Operation not permitted`; py-spy and gdb
need the same right.

How to fix
----------
netlink-refused: an AppArmor or seccomp profile, or a systemd unit, that allows AF_NETLINK (docker
run --security-opt seccomp=unconfined). process-access-refused: docker run --cap-add=SYS_PTRACE,
sysctl -w kernel.yama.ptrace_scope=0, or PYTORCH_CUDA_ALLOC_CONF without expandable_segments.

When it is wrong
----------------
A job whose backend is neither NCCL nor gloo may need no netlink. Most jobs hand no CUDA tensors to
other processes: with `--groups weight-sync` that is a warning, else only information. Which of
several guards refuses a call is a guess.
The handing over of CUDA tensors is not validated on hardware.

References
----------
getifaddrs(3), netlink(7), pidfd_getfd(2), ptrace(2), seccomp(2); systemd.exec(5); Docker
documentation, seccomp profiles; gloo, transport/tcp/device.cc; pytorch/pytorch issue 165685.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.containers import container_of
from nccl_doctor.toolkit.host import text_of

_NOT_EXPANDABLE = "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
NETLINK = Kind(
    "netlink-refused",
    Layer.HOST,
    "The kernel refuses netlink, by which interfaces are listed",
    "NCCL and gloo call getifaddrs before anything else: gloo stops with `Permission denied`, NCCL "
    "with `no socket interface found` or a system error.",
    Fix(
        Step(
            shell(
                "# docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
            )
        ),
        alternatives=["use a profile that allows AF_NETLINK"],
    ),
)
PROCESSES = Kind(
    "process-access-refused",
    Layer.HOST,
    "The kernel refuses to hand files of one process to another",
    "torch shares CUDA tensors of expandable segments between processes in this way: `pidfd_getfd: "
    "Operation not permitted`.",
    Fix(Step(shell("# docker run --cap-add=SYS_PTRACE")), alternatives=[_NOT_EXPANDABLE]),
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
"""Numbers of the system calls, the same on every machine type."""
_NO_FILE = 1 << 20
"""A number that no open file has: what is allowed ends with EBADF, and nothing is copied."""
_GVISOR = "Sun Jan 10 15:06:54 PST 2016"
"""When gVisor's kernel was built, as it always says (pkg/sentry/kernel)."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class KernelAccess(Check):
    """Makes calls that guards of the kernel forbid, and reads which guards there are."""

    name = "kernel_access"
    layer = Layer.HOST
    kinds = (NETLINK, PROCESSES)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`netlink`, `processes`: name of the error of a call that failed, None if it is allowed;
        `proc_net`: whether /proc/net can be read; `expandable`: whether torch is to use expandable
        segments. `guards`: what may forbid calls here; `container`: its runtime, or empty; `line`:
        all this for people.
        """
        facts = {
            "netlink": _of_interfaces(),
            "processes": _of_another_process(),
            "proc_net": _is_readable(ctx.root / "proc/net/tcp"),
            "expandable": any(_EXPANDABLE.search(ctx.env.get(name, "")) for name in _SETTINGS),
            "guards": _guards(ctx.root),
            "container": container_of(ctx.root, ctx.env),
        }
        return {**facts, "line": _line(facts)}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """One line of what is allowed."""
        for rank, facts in cluster.facts(self.name):
            yield Figure("kernel access", facts["line"], Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts whose kernel refuses what the job needs."""
        for rank, facts in cluster.facts(self.name):
            if facts["netlink"]:
                yield Finding(
                    NETLINK,
                    f"getifaddrs: {facts['netlink']} ({facts['line']})",
                    Where(hosts=(rank.host.label,)),
                    dict(facts),
                    fix=_allow_netlink(facts),
                )
            if facts["processes"] and facts["expandable"] and cluster.backend == "nccl":
                yield _not_handed_over(cluster, rank, facts)


# Observing ----------------------------------------------------------------------------------------


def _of_interfaces() -> str | None:
    """Error of the call by which NCCL and gloo list interfaces."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        return _name(ctypes.get_errno())
    libc.freeifaddrs(first)
    return None


def _of_another_process() -> str | None:
    """Error of copying a file of the parent, which is no more to this process than another rank."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_int(os.getppid()), ctypes.c_uint(0))
    if handle < 0:
        return _name(ctypes.get_errno())
    try:
        file, flags = ctypes.c_int(_NO_FILE), ctypes.c_uint(0)
        libc.syscall(ctypes.c_long(_PIDFD_GETFD), ctypes.c_int(handle), file, flags)
        error = ctypes.get_errno()
    finally:
        os.close(handle)
    return None if error == errno.EBADF else _name(error)


def _name(number: int) -> str:
    return errno.errorcode.get(number, f"error {number}")


def _is_readable(file: Path) -> bool:
    """True if a file can be read; not all of it, as the table of sockets may be large."""
    try:
        with file.open("rb", buffering=0) as opened:
            return bool(opened.read(64))
    except OSError:
        return False


def _guards(root: Path) -> list[str]:
    """`gVisor`, `seccomp`, `no_new_privs`, `AppArmor NAME`, `SELinux TYPE`, `Yama N`."""
    found = ["gVisor"] if _GVISOR in text_of(root / "proc/version") else []
    rows = (line.partition(":") for line in text_of(root / "proc/self/status").splitlines())
    status = {name: value.strip() for name, _, value in rows}
    found += ["seccomp"] if status.get("Seccomp", "0") != "0" else []
    found += ["no_new_privs"] if status.get("NoNewPrivs", "0") != "0" else []
    label = text_of(root / "proc/self/attr/current").strip("\0")
    # user:role:type:level, and the level of each container is another.
    name = f"SELinux {label.split(':')[2]}" if label.count(":") > 2 else f"AppArmor {label}"
    found += [name] if label and "unconfined" not in name else []
    scope = text_of(root / "proc/sys/kernel/yama/ptrace_scope")
    return found + ([f"Yama {scope}"] if scope not in ("", "0") else [])


def _line(facts: Mapping[str, Any]) -> str:
    calls = (("netlink", facts["netlink"]), ("pidfd_getfd", facts["processes"]))
    said = [f"{name} {error or 'allowed'}" for name, error in calls]
    said += [f"/proc/net {'readable' if facts['proc_net'] else 'not readable'}"]
    return ", ".join(said) + f"; guards: {', '.join(facts['guards']) or 'none'}"


# Judging ------------------------------------------------------------------------------------------

_TRACE = Fix(Step(shell("sysctl -w kernel.yama.ptrace_scope=0"), note="as root"))


def _allow_netlink(facts: Mapping[str, Any]) -> str:
    """The setting of the most likely guard: seccomp is asked before security modules are."""
    refused, guards, container = facts["netlink"], facts["guards"], facts["container"]
    module = next((each for each in guards if each.startswith(("AppArmor", "SELinux"))), "")
    if refused == "EACCES" and module.startswith("AppArmor"):
        profile = module.split()[1]
        if container == "docker":
            return Fix(Step(shell("# docker run --security-opt apparmor=unconfined")))
        note = f"after the line 'network netlink raw,' was added to it, the profile {profile}"
        return Fix(Step(shell("# apparmor_parser -r FILE"), note=note, persists=True))
    if refused == "EACCES" and module:
        if container:
            return Fix(Step(shell("# {} run --security-opt label=disable", container)))
        return Fix(
            look(shell("ausearch -m avc -ts recent | audit2allow"), "the rule that SELinux lacks")
        )
    if container == "kubernetes":
        return "securityContext: {seccompProfile: {type: Unconfined}} in the spec of the pod"
    if container:
        return Fix(Step(shell("# {} run --security-opt seccomp=unconfined", container)))
    return (
        "add AF_NETLINK to RestrictAddressFamilies= of the systemd unit, or allow it in whatever "
        "seccomp filter the job is started under"
    )


def _not_handed_over(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Finding:
    scope = next((each for each in facts["guards"] if each.startswith("Yama")), "")
    ways = {
        "kubernetes": "securityContext: {capabilities: {add: [SYS_PTRACE]}} of the container",
        "docker": Fix(Step(shell("# docker run --cap-add=SYS_PTRACE"))),
        "podman": Fix(Step(shell("# podman run --cap-add=SYS_PTRACE"))),
    }
    way = ways.get(facts["container"], _TRACE if scope else "")
    first = way if isinstance(way, Fix) else Fix(text=way)
    return Finding(
        PROCESSES,
        f"pidfd_getfd: {facts['processes']}, and torch is to use expandable segments "
        f"({facts['line']})",
        Where(hosts=(rank.host.label,)),
        dict(facts),
        fix=Fix(
            *first.steps, text="" if first.steps else str(first), alternatives=[_NOT_EXPANDABLE]
        )
        if way
        else _NOT_EXPANDABLE,
        severity=Severity.WARN if cluster.job.groups == "weight-sync" else None,
        confidence=Confidence.LIKELY,
    )
