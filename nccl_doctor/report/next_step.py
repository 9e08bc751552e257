"""Last lines of a report for people: the commands to type next. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.findings import Level
from nccl_doctor.model.launch import OWN
from nccl_doctor.model.report import Report
from nccl_doctor.system.files import GZIP

_FEW = 3
"""Reports of hosts that are named one by one."""


class NextStep(NamedTuple):
    """One line: the command to type, and words before and behind it."""

    command: str
    before: str = ""
    behind: str = ""

    @property
    def line(self) -> str:
        """The line as text, which begins with `Next:`."""
        return " ".join(filter(None, ("Next:", self.before, self.command, self.behind)))


def next_steps(report: Report, *, every_check: bool = False) -> Iterator[NextStep]:
    """The last lines; `every_check`: the report already shows all of them."""
    codes = dict.fromkeys(finding.code for finding in report.root_causes)
    if codes:
        yield NextStep(f"nccl-doctor explain {next(iter(codes))}")
    elif report.verdict == "unknown" and not every_check:
        yield NextStep("", "run again with -vv to see every check")
    elif report.verdict == "pass" and (job := _job(report)):
        yield job
    if _has_unmet_hosts(report):
        yield _one_answer(report)


def _job(report: Report) -> NextStep | None:
    """The line to type after a pass; None where the job starts by itself, or none is known."""
    run, cluster = report.run, report.cluster
    words = (run.command or "").split()
    if run.source or run.alone or "merged" in run.extra or not words or "--" in words:
        return None
    if run.selected or cluster.level is Level.QUICK:
        return NextStep("nccl-doctor run", behind="with the checks that were left out")
    launches = [rank.launch for rank in cluster.ranks if rank.launch is not None]
    if not launches:
        return None
    first = launches[0]
    if first.launcher != OWN:
        by = "" if first.launcher == "env" else f", with {first.launcher}"
        return NextStep("", f"start the job as you started this{by}")
    if "--hostfile" in words:
        hosts = words[words.index("--hostfile") :][1:2]
        return NextStep("", f"start the job on the hosts of {hosts[0]}") if hosts else None
    ranks = first.local_world_size or len(launches)
    if first.nnodes in (None, 1):
        return NextStep(shell("torchrun --nproc-per-node {:number} train.py", ranks))
    sizes = shell("--nnodes {:number} --nproc-per-node {:number}", first.nnodes, ranks)
    master = shell("--master-addr {} --master-port {:number}", first.master_addr, first.master_port)
    line = shell("torchrun {} --node-rank $NODE_RANK {} train.py", sizes, master)
    return NextStep(line, "on every host:")


def _has_unmet_hosts(report: Report) -> bool:
    """True if hosts may have left reports of their own, which are not in this one."""
    cluster, run = report.cluster, report.run
    if run.alone or "merged" in run.extra or max(cluster.nnodes, len(cluster.hosts)) < 2:
        return False
    if cluster.complete:  # two that claim one node rank are both here
        return sum(host.reported for host in cluster.hosts) < cluster.hosts_wanted
    return True


def _one_answer(report: Report) -> NextStep:
    folder, outputs = report.run.options.get("output_dir"), report.run.options.get("outputs")
    path = outputs.get("json") if isinstance(outputs, dict) else None
    if isinstance(folder, str) and folder:
        return NextStep(shell("nccl-doctor report merge {}/node*.json", folder), behind=_OF_ALL)
    if isinstance(path, str) and path and path != "-":
        return NextStep(_merge(report, path), behind=_OF_ALL)
    return NextStep("", _AGAIN)


_OF_ALL = "(one answer, from the reports of all hosts in one place)"
_AGAIN = (
    "run again on all hosts with --output-dir FOLDER, which they share, for one answer; or with "
    "--json FILE, and then nccl-doctor report merge FILE FILE"
)


def _merge(report: Report, path: str) -> Command:
    """The command for the files of node 0 and of the hosts that wrote their own beside it."""
    cluster = report.cluster
    here = [host.node_rank for host in cluster.hosts if host.reported]
    gone = [host.node_rank for host in cluster.hosts if not host.reported]
    nodes = sorted(node for node in (gone if cluster.complete else here) if node)
    if not nodes or len(nodes) > _FEW:
        stem, end = _parted(path)
        return shell("nccl-doctor report merge {} {}.node*{}", path, stem, end)
    return shell("nccl-doctor report merge {}", [path, *(beside(path, f"node{n}") for n in nodes)])


def beside(path: str, who: str) -> str:
    """Path of the report of a host that signs in nowhere: `report.node2.json` for `report.json`."""
    stem, end = _parted(path)
    return f"{stem}.{who}{end}"


def _parted(path: str) -> tuple[str, str]:
    packed = GZIP if path.endswith(GZIP) else ""
    target = PurePath(path.removesuffix(packed))
    return str(target.with_suffix("")), (target.suffix or ".json") + packed
