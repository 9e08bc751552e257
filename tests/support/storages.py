"""Made-up hosts with a path that they share, or that each has its own of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster
from nccl_doctor.toolkit.storage.examine import ALL
from tests.support.clusters import make_cluster, outcome, reread

NFS = ("nfs4", "fs1:/export", "/ckpt")
LOCAL = ("ext4", "/dev/sda1", "/")
PATH = "/ckpt/run1"


class Storage:
    """Hosts with one path, to be spoilt by a test. They see each other's files where `share`d."""

    def __init__(
        self, count: int, mount: Sequence[str] = NFS, *, share: bool = True, path: str = PATH
    ) -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.facts: dict[str, dict[str, Any]] = {}
        for name in self.names:
            self.facts[name] = {"path": path, "writes": True, "sees": {}, **well(mount)}
        for name in self.names:
            self.sees(name, [n for n in self.names if n != name], 0.01 if share else None)

    def seat(self, name: str) -> int:
        return 2 * self.names.index(name)

    def sees(self, name: str, others: Iterable[str], after_s: float | None) -> Storage:
        for other in others:
            self.facts[name]["sees"][str(self.seat(other))] = after_s
        return self

    def apart(self, *groups: Sequence[str]) -> Storage:
        """Separate groups: no host sees one of another group."""
        for group in groups:
            for name in group:
                self.sees(name, [n for n in self.names if n not in group], None)
        return self

    def change(self, *names: str, mount: Sequence[str] = (), **fields: Any) -> Storage:
        for name in names:
            of_mount = dict(zip(("type", "source", "mount"), mount, strict=False))
            self.facts[name] = {**self.facts[name], **of_mount, **fields}
        return self

    def fail(self, name: str, number: int | None, step: str = "look", text: str = "why") -> Storage:
        """A step fails, so nothing of this host was written for others to see."""
        self.apart([name], [n for n in self.names if n != name])
        return self.change(name, error={"step": step, "errno": number, "text": text}, sees={})

    def cluster(self, check: str, round_name: str = ALL, **fields: Any) -> Cluster:
        made = make_cluster(self.names, **fields)
        hosts = []
        for host in made.hosts:
            told = {"paths": [self.facts[host.name or ""]]}
            hosts.append(replace(host, facts=reread({check: {round_name: outcome(told)}})))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        return replace(made, hosts=tuple(hosts), ranks=ranks)


def well(mount: Sequence[str] = NFS) -> dict[str, Any]:
    kind, source, folder = mount
    return {
        "form": "folder",
        "real": PATH,
        "owner": 1000,
        "mode": "755",
        "uid": 1000,
        "free": 10 << 40,
        "inodes_free": 10**9,
        "type": kind,
        "source": source,
        "mount": folder,
        "write_s": 0.004,
    }
