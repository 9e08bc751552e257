"""Causes of processes stuck in the kernel, by process name and kernel function. Pure.

Functions of a module begin with a word of their own. Source: the Linux kernel (fs/nfs, net/sunrpc,
fs/smb, fs/ceph, fs/fuse, fs/autofs, net/9p, drivers/nvme, drivers/infiniband),
NVIDIA/open-gpu-kernel-modules, and the sources of Lustre and BeeGFS.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nccl_doctor.model.commands import shell
from nccl_doctor.model.fixes import Fix, Step, look


class WaitCause(NamedTuple):
    """A cause that processes wait for; `file_systems` are types of mounts as in /proc/mounts."""

    words: str
    channel: re.Pattern[str]
    name: re.Pattern[str] | None
    file_systems: tuple[str, ...]
    fix: str


def _cause(words: str, channel: str, name: str = "", mounts: str = "", fix: str = "") -> WaitCause:
    by_name = re.compile(name) if name else None
    return WaitCause(words, re.compile(channel), by_name, tuple(mounts.split()), fix)


_NOT_RESPONDING = look(shell("dmesg | grep -i 'not responding'"), "which server; bring it back")
_UNMOUNT = Fix(Step(shell("# umount -f -l MOUNT"), persists=True))
_SERVER = Fix(_NOT_RESPONDING, alternatives=[_UNMOUNT])
GPU_DRIVER = _cause(
    "NVIDIA's driver",
    r"nvidia|_?nv_|_nv\d|nvkms|uvm_|rm_|os_acquire_",
    r"nvidia-|nv-hostengine|nv-fabric",
    fix=Fix(
        look(shell("dmesg | grep -e NVRM -e Xid"), "shows which GPU"),
        alternatives=["if it does not recover: reboot the host"],
    ),
)
CAUSES = (
    _cause("NFS", r"nfs|rpc_|rpcauth_|xprt_", r"u?mount\.nfs", "nfs nfs4", _SERVER),
    _cause("SMB", r"cifs|smb[23]?_|wait_for_response", r"mount\.cifs", "cifs smb3", _SERVER),
    _cause(
        "Lustre",
        r"ll_|ptlrpc|ldlm_|osc_|lov_|mdc_|obd_|cl_(io|lock|page|sync)_",
        r"mount\.lustre",
        "lustre",
        Fix(look(shell("lfs check servers")), _NOT_RESPONDING, alternatives=[_UNMOUNT]),
    ),
    _cause(
        "Ceph",
        r"ceph",
        r"mount\.ceph",
        "ceph",
        Fix(look(shell("ceph status")), _NOT_RESPONDING, alternatives=[_UNMOUNT]),
    ),
    _cause(
        "GPFS",
        r"cxi|mmfs|gpfs",
        "",
        "gpfs",
        Fix(look(shell("mmgetstate -a")), look(shell("mmdiag --waiters"), "shows why")),
    ),
    _cause("BeeGFS", r"Fhgfs|beegfs", "", "beegfs", _SERVER),
    _cause("9p", r"p9_|v9fs", "", "9p", "its server is outside of this virtual machine"),
    _cause(
        "a file system in user space (FUSE)",
        r"fuse|request_wait_answer",
        r"mount\.fuse",
        "fuse virtiofs",
        Fix(
            text="check the process that serves it",
            alternatives=[Fix(Step(shell("# fusermount -u -z MOUNT"), persists=True))],
        ),
    ),
    _cause(
        "automount",
        r"autofs",
        "",
        "autofs",
        Fix(look(shell("systemctl status autofs"), "a server may be down")),
    ),
    GPU_DRIVER,
    _cause(
        "NVMe",
        r"nvme",
        fix=Fix(
            look(shell("dmesg | grep nvme")), look(shell("nvme list"), "which disk does not answer")
        ),
    ),
    _cause(
        "RDMA",
        r"ib_|mlx[45]|uverbs|rdma_|ucma_|cma_",
        fix=Fix(
            look(shell("dmesg | grep mlx5_core")),
            look(shell("ibstat"), "which device does not answer"),
        ),
    ),
)


def cause_of(name: str, channel: str) -> WaitCause | None:
    """The cause that a process waits for; None if not known.

    Args:
        name: of the program.
        channel: the kernel function that it waits in, or empty.
    """
    by_channel = (each for each in CAUSES if each.channel.match(channel))
    by_name = (each for each in CAUSES if each.name is not None and each.name.match(name))
    return next(by_channel, None) or next(by_name, None)
