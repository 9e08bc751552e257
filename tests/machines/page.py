"""docs/machines.md: what the program says of every machine of the gallery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nccl_doctor.api import Finding
from nccl_doctor.model.report import Report
from tests.machines.program import Gallery, Machine, loud, quiet
from tests.machines.recorded import NOT_HERE

MARK = "<!-- Written by scripts/machines.py; do not edit. -->"
_HEAD = """# Machines

What nccl-doctor says of machine types that its authors do not have: two hosts of each, first in
order, then with one thing wrong on the second host. The machines are made up from public
descriptions and listings, in `tests/machines/gallery`, one file for each; no run on such hardware
is on record.

What is real in these runs: the checks read files of `/sys`, `/proc`, `/dev` and `/etc` below the
folder of a host, and a stand-in for NVML or amdsmi, in child processes as on a host; sign-ins,
rounds as planned, judging, reports and exit codes are the program's. What is made up: everything
that needs a GPU or a network, which is CUDA as torch sees it, collectives and their speed, the
interfaces of IP, CPUs and limits (`tests/machines/recorded.py`)."""


def page(gallery: Gallery, machines: Sequence[Machine]) -> str:
    """The text of the page."""
    parts = [_HEAD, *_left_out(), "| machine | in order | with a fault |", "|---|---|---|"]
    sections = []
    for machine in machines:
        healthy = gallery.run(machine)
        broken = [(fault, gallery.run(machine, fault)) for fault in machine.faults]
        anchor = "".join(
            c for c in machine.title.lower().replace(" ", "-") if c.isalnum() or c == "-"
        )
        named = sum(fault.code in {f.code for f in loud(report)} for fault, report in broken)
        row = f"{healthy.verdict} | {named} of {len(broken)} named"
        parts.append(f"| [{machine.title}](#{anchor}) | {row} |")
        sections += ["", f"## {machine.title}", "", machine.about, ""]
        ranks = "1 rank" if machine.ranks == 1 else f"{machine.ranks} ranks"
        sections += [f"{ranks} on each host, started by {machine.launcher}.", ""]
        sections += [f"In order: **{healthy.verdict}**. {healthy.summary}", ""]
        sections += [f"* info `{each.code}`: {each.message}" for each in quiet(healthy)]
        sections += ["", "| what is wrong on node1 | what the report says | where | exit code |"]
        sections += ["|---|---|---|---|"]
        sections += [_row(fault.title, report) for fault, report in broken]
        sections += ["", f"Made after: {'; '.join(machine.sources)}."]
    return "\n".join([*parts, *sections, "", MARK, ""])


def _left_out() -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for check, why in NOT_HERE.items():
        reasons.setdefault(why, []).append(f"`{check}`")
    yield ""
    yield "Checks that are left out here:"
    yield ""
    for why, checks in reasons.items():
        yield f"* {', '.join(sorted(checks))}: {why}."
    yield ""


def _row(title: str, report: Report) -> str:
    said = "<br>".join(
        f"{each.level.value} [{each.code}](codes/{each.code}.md): {_cell(each.message)}"
        for each in loud(report)
    )
    where = "<br>".join(_cell(_where(each)) for each in loud(report))
    return f"| {title} | {said} | {where} | {report.exit_code} |"


def _where(found: Finding) -> str:
    where = found.where
    parts = [*where.hosts, *where.interfaces, *where.devices]
    if where.ranks:
        parts.append("rank " + ", ".join(map(str, where.ranks)))
    return ", ".join(parts) or "the cluster"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
