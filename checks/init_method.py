"""Can all ranks meet in the file that the job gives as init_method?

What it checks
--------------
Only with `--init-method file:///PATH`, as the job calls torch.distributed.init_process_group with
it. On every host: whether its folder is there and can be written to, as in check `paths`; whether
it is one folder on all hosts, by a file that each host writes there and the others look for;
whether a lock of one host is felt by the others (flock, which torch's FileStore relies on); and
whether the file is there already. `env://` is what all other checks examine, and `tcp://HOST:PORT`
stands for --master-addr and --master-port; where a launcher gives MASTER_PORT, and another one,
check `endpoints` tries HOST:PORT.

Why it matters
--------------
torch deletes the file at the end of a job, but not if the job is killed. The next job on the same
file reads the addresses of the last one: `Connection refused, remote=…`, a time-out, or a world
that is mixed from both. On folders that are not shared, each host waits for ranks that write
somewhere else. Without locks, two ranks write over each other, and keys are lost.

How to fix
----------
rm the file before every start, or use a new name for each job
(`file:///shared/init-$SLURM_JOB_ID`); put it on a file system that all hosts mount, with locks
(Lustre: mount with -o flock). MASTER_ADDR and MASTER_PORT (env://) need neither.

When it is wrong
----------------
An empty file is taken for a new one, as torch does. A file of a job that is running now is a left
over one too: two jobs cannot share it. Which world size used it is read from the counter that torch
keeps in it, by torch 2.

References
----------
PyTorch documentation, torch.distributed, shared file-system initialization; PyTorch
torch/csrc/distributed/c10d/FileStore.cpp; TransformerEngine pull request 3478; flock(2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Layer,
    Round,
    Skip,
    Step,
    Where,
    fill,
    host_labels,
    shell,
)
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.storage.examine import NeededPath, examine, rounds_of
from nccl_doctor.toolkit.storage.kinds import PATH_KINDS, path_kind
from nccl_doctor.toolkit.storage.rules import (
    Hosts,
    Labels,
    broken,
    mount_line,
    not_shared,
    paths_of,
    unseen,
    well_of,
)
from nccl_doctor.toolkit.storage.sharing import sharing_of

LEFT_OVER = path_kind(
    "init-file-left-over",
    "The file of init_method is left over from an earlier run",
    "torch reads the addresses of that run from it: ranks connect to ports that nobody has, or "
    "wait.",
    Fix(Step(shell("# rm FILE"), persists=True)),
)
NOT_SHARED = path_kind(
    "init-file-not-shared",
    "The file of init_method is not the same one on all hosts",
    "Ranks of different hosts never meet: each host waits for the others until the time-out.",
    "put the file on a file system that all hosts mount, or use env:// with MASTER_ADDR",
)
NO_LOCK = path_kind(
    "init-file-no-lock",
    "File locks do not work where the file of init_method is",
    "torch's FileStore locks the file for every key: without that keys are lost, and ranks wait.",
    "mount it with locks (Lustre: -o flock; NFS: without nolock and local_lock), or use "
    "env:// with MASTER_ADDR",
)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class InitMethod(Check):
    """Uses the folder of the file on all hosts at the same time, and looks at the file."""

    name = "init_method"
    layer = Layer.HOST
    cost = "seconds"
    kinds = (LEFT_OVER, NOT_SHARED, NO_LOCK, *PATH_KINDS)
    together = True

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """All hosts, in groups if they are many."""
        if not cluster.job.init_file:
            raise Skip("--init-method file:///PATH was not given")
        return rounds_of(cluster, {"file": cluster.job.init_file})

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`paths`: what `examine` returns for the folder; `name`: that of the file."""
        folder, name = os.path.split(str(ctx.params["file"]))
        return {"paths": examine(ctx, [NeededPath(folder)], store=name), "name": name}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the folder, on locks, and on the file."""
        labels = host_labels(cluster)
        names = {facts.get("name", "") for _, facts in cluster.facts(self.name, "hosts")}
        for folder, hosts in paths_of(cluster, self.name).items():
            path = os.path.join(folder, min(names, default=""))
            well = well_of(hosts)
            sharing = sharing_of(well, must=True)
            yield from broken(folder, hosts, labels, mount_line(well, sharing.main), "")
            yield from not_shared(NOT_SHARED, path, well, sharing, labels)
            yield from unseen(folder, sharing, labels)
            yield from _locks(folder, well, labels)
            yield from _left_over(path, well, labels, cluster.world_size)


def _locks(folder: str, well: Hosts, labels: Labels) -> Iterator[Finding]:
    for seat, facts in well.items():
        if facts.get("lock_error"):
            yield Finding(
                NO_LOCK,
                f"{folder}: flock: {facts['lock_error']}",
                Where(hosts=(labels[seat],)),
                {"type": facts["type"], "source": facts["source"]},
            )
    felt = {
        (seat, int(other)): value
        for seat, facts in well.items()
        for other, value in facts.get("feels", {}).items()
        if value is not None and int(other) in well and not well[int(other)].get("lock_error")
    }
    lost = [pair for pair, value in felt.items() if not value]
    if lost:
        kinds = sorted({well[seat]["type"] for seat, _ in lost})
        yield Finding(
            NO_LOCK,
            f"{folder} ({', '.join(kinds)}): a lock of one host does not keep another one out "
            f"({len(lost)} of {len(felt)} ordered pairs)",
            Where(
                hosts=tuple(sorted({labels[seat] for pair in lost for seat in pair})),
                links=link_names(labels, lost),
            ),
            confidence=Confidence.LIKELY,
        )


def _left_over(path: str, well: Hosts, labels: Labels, world: int | None) -> Iterator[Finding]:
    there = {
        seat: facts["file"]
        for seat, facts in well.items()
        if facts.get("file") and (facts["file"]["size"] or not facts["file"]["regular"])
    }
    if not there:
        return
    one = there[min(there)]
    message = f"{path}: {one['size']} bytes, last written {_age(one['age_s'])} ago"
    if not one["regular"]:
        message = f"{path} is there, and no file"
    elif one.get("ranks"):
        message += f", used by {one['ranks']} ranks"
        message += f" (this job has {world})" if world and world != one["ranks"] else ""
    yield Finding(
        LEFT_OVER,
        message,
        Where(hosts=tuple(sorted(labels[seat] for seat in there))),
        {"owner": one["owner"]},
        fix=fill(LEFT_OVER.fix, FILE=path) if one["regular"] else "give another file",
    )


def _age(seconds: float) -> str:
    for unit, name in ((_DAY, "days"), (_HOUR, "hours"), (_MINUTE, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
