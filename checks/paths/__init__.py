"""Can every host use the storage that the job needs?

What it checks
--------------
Only with `--path DIR`, which may be given several times: folders for checkpoints, data or caches
(`--path DIR:ro` for one that the job only reads; a file is only read too). On every host, each path
in a process of its own: whether it is there and readable, and which file system it is on; how much
room is left; then a file of 4 KiB is written, with fsync, and read back, three times; then the
hosts, in groups of 32 and then the first hosts of these, look for the files of the others. Each
step has 8 s. All files are called `.nccl-doctor-` and random digits, and are removed before the
round ends, and also if the program is killed. What is left by a host that lost its power, or on a
disk that did not answer for a minute, the next run removes after an hour.

Why it matters
--------------
A rank that waits for a dead file server waits in the kernel, without a word, and the others report
a time-out in a collective: operators find storage behind most of them. A host without the mount
writes its part of a checkpoint to its own disk, and that shows when the checkpoint is loaded.

How to fix
----------
Mount what the other hosts have (the finding has their mount), bring the file server back, give this
user the right to write there, or remove what is not needed.

When it is wrong
----------------
A path has to be shared only if half of the hosts or more have it from the same source of a network
file system (NFS, Lustre, GPFS, BeeGFS, CephFS, …), or more than half saw each other's files on
another one that may come from outside of the host (9p, virtiofs, FUSE). What lies on a disk of its
own on every host is healthy, and so is an export of its own for every host. With `:ro`, or for a
file, nothing is written, so only the mounts are compared. Quotas show only when they are
used up. A file of another host that is not visible within 8 s may be later: NFS keeps attributes
for up to a minute. Little room is less than 1 GiB or 1,000 inodes. Throughput is not measured.

References
----------
nfs(5) (Data and metadata coherence; hard, soft, actimeo, lookupcache); proc(5) (mounts);
CoreWeave, What do NCCL errors mean; NVIDIA nvidia-resiliency-ext (storage probe).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Round, Skip
from nccl_doctor.toolkit.storage.examine import NeededPath, examine, rounds_of
from nccl_doctor.toolkit.storage.kinds import PATH_KINDS
from nccl_doctor.toolkit.storage.rules import paths_of

from .rules import NOT_SHARED, SLOW, judge_path


class Paths(Check):
    """Uses the paths that the user names, on all hosts at the same time."""

    name = "paths"
    layer = Layer.HOST
    cost = "seconds"
    kinds = (*PATH_KINDS, NOT_SHARED, SLOW)
    together = True

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """All hosts, in groups if they are many."""
        if not cluster.job.paths:
            raise Skip("--path DIR was not given: give the storage that the job needs")
        return rounds_of(cluster, {"paths": [list(each) for each in cluster.job.paths]})

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`paths`: what `examine` returns for each."""
        places = [NeededPath(str(path), bool(writes)) for path, writes in ctx.params["paths"]]
        return {"paths": examine(ctx, places)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each path."""
        for path, hosts in paths_of(cluster, self.name).items():
            yield from judge_path(cluster, path, hosts)
