"""NVIDIA's IMEX daemon on this host: whether it runs, and which hosts it knows.

Sources: NVIDIA IMEX guide (config.cfg, IMEX_NODE_CONFIG_FILE, nodes_config.cfg);
dra-driver-nvidia-gpu, cmd/compute-domain-daemon and cmd/compute-domain-kubelet-plugin (its daemons
run in pods, with /etc/nvidia-imex or, since October 2025, /imexd in the pod).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from nccl_doctor.api import Skip, Untested
from nccl_doctor.toolkit.host import text_of

_COMM = "nvidia-imex"
_CONFIG = "/etc/nvidia-imex/config.cfg"
_NODES = "/etc/nvidia-imex/nodes_config.cfg"
_SETTING = re.compile(r"^\s*IMEX_NODE_CONFIG_FILE\s*=\s*(\S+)", re.MULTILINE)
_DRA_PLUGIN = "var/lib/kubelet/plugins/compute-domain.nvidia.com"
_KUBELETS = ("kubelet", "k3s", "k3s-server", "k3s-agent", "rke2", "kubelite")
_IN_POD = re.compile(r"kubepods")
_IN_CONTAINER = re.compile(r"docker|libpod|containerd|crio|machine\.slice")
_DRA = "NVIDIA's DRA driver runs IMEX on this host, in pods of its own"
_MOST_BYTES = 1 << 16


class ImexFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    running: bool
    file: str
    nodes: list[str] | None


def read_daemon(root: Path, env: Mapping[str, str], crumb: Callable[..., None]) -> ImexFacts:
    """`running`: whether the daemon of this host runs; `file`: its list of hosts; `nodes`: the
    entries of that list, None if it runs in a container, with a list that is not seen.

    Raises:
        Skip: somebody else may run it, where it cannot be seen.
        Untested: it runs, and its list cannot be read.
    """
    if "KUBERNETES_SERVICE_HOST" in env:
        raise Skip("in a pod: the node, or NVIDIA's DRA driver in other pods, runs IMEX")
    if os.path.exists(root / _DRA_PLUGIN):
        raise Skip(_DRA)
    proc = root / "proc"
    # All processes of the machine can be seen: no container has its kernel threads.
    if text_of(proc / "2/comm") != "kthreadd":
        raise Skip("the processes of the host cannot be seen from this container")
    names = {path.parent: text_of(path) for path in proc.glob("[0-9]*/comm")}
    daemons = [process for process, name in names.items() if name == _COMM]
    groups = {process: text_of(process / "cgroup") for process in daemons}
    if any(_IN_POD.search(group) for group in groups.values()):
        raise Skip(_DRA)
    if not daemons:
        if any(name in _KUBELETS for name in names.values()):
            raise Skip("a node of Kubernetes: IMEX may be run in a pod when a job starts")
        if "slurmd" in names.values() and "SLURM_JOB_ID" not in env:
            raise Skip("outside of a Slurm job, and Slurm may start IMEX for each job")
        return {"running": False, "file": "", "nodes": None}
    if any(_IN_CONTAINER.search(group) for group in groups.values()):
        return {"running": True, "file": "", "nodes": None}
    config = _config_of(daemons[0])
    crumb("read the configuration of IMEX", file=config)
    found = _SETTING.findall(_start_of(root, config) or "")
    file = found[-1] if found else _NODES
    crumb("read the list of hosts of IMEX", file=file)
    text = _start_of(root, file)
    if text is None:
        raise Untested(
            f"{file}, the list of hosts of IMEX, cannot be read",
            {"running": True, "file": file, "nodes": None},
        )
    return {"running": True, "file": file, "nodes": list(_entries(text))}


def _config_of(process: Path) -> str:
    words = text_of(process / "cmdline").split("\0")
    after = [word for flag, word in pairwise(words) if flag == "-c"]
    return after[-1] if after else _CONFIG


def _start_of(root: Path, file: str) -> str | None:
    """The text of a file, at most so much; None if it cannot be read."""
    try:
        with (root / file.lstrip("/")).open("rb") as stream:
            return stream.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _entries(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            yield words[0]
