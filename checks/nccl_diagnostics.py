"""What do NCCL's own diagnostics say of the GPUs of each host?

What it checks
--------------
With NCCL 2.31 or newer, the ranks of each host form one more group with NCCL_RUN_DIAGNOSTICS=1: as
it makes the communicator, NCCL lets each GPU read and write the memory of each other one that it
would reach directly (NVLink or PCIe), and compares the data. Its words are quoted. The groups stay
within one host, where NCCL leaves out its test of the network. Runs at level full, after the
collectives of all ranks worked.

Why it matters
--------------
The all-reduces of other checks use some of these paths only, and NCCL may hide a broken one behind
another algorithm. NCCL names the pair of GPUs, the path, and what to look at.

How to fix
----------
As NCCL's advice in the finding says. Wrong data: take the GPU or the host out of the job, and test
the link (nvidia-smi nvlink -e; dcgmi diag -r 3). Memory that cannot be mapped: IPC namespace,
--gpus and CUDA_VISIBLE_DEVICES of the containers; IOMMU and ACS (check `gpu_direct`).

When it is wrong
----------------
Pairs that NCCL joins by way of another GPU are not tested by it. What it reports does not stop a
job: where no collective fails, the path may never be used. A GPU is named alone if every pair that
failed has it, and there are several; else both.
Not validated on hardware: tested on made-up clusters and on lines as NCCL 2.32.3 formats them.

References
----------
NCCL user guide, troubleshooting, diagnostics (NCCL_RUN_DIAGNOSTICS, since 2.31); NCCL
src/diagnostics/p2p.cc.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Rank,
    Round,
    Scope,
    Severity,
    Skip,
    Untested,
    look,
    place_of,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import GROUP_READS, attempt_deadline
from nccl_doctor.toolkit.groups.exercise import Exercise
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import GROUP_NEEDS
from nccl_doctor.toolkit.hosts import collectives_worked
from nccl_doctor.toolkit.versions import release

FAILED = Kind(
    "nccl-diagnostics-failed",
    Layer.COLLECTIVE,
    "NCCL's own diagnostics report a broken path between GPUs",
    "NCCL would copy data between these GPUs directly, and its test of that path failed.",
    Fix(
        look(shell("nvidia-smi nvlink -e")),
        look(shell("nvidia-smi topo -p2p r")),
        look(shell("dmesg | tail"), "the kernel log"),
    ),
    Severity.WARN,
)
_VARIABLE = "NCCL_RUN_DIAGNOSTICS"
_SINCE = (2, 31)
_LINE = re.compile(r"NCCL DIAG (?:\[(OK|INFO)\]\s*)?(.*?)(?: in comm 0x[0-9a-f]+)?$", re.MULTILINE)
_PAIR = re.compile(r"p2p: (.+?) srcRank=(\d+) .*?dstRank=(\d+)")
_PARTIAL = re.compile(r"p2p: only \d+/\d+ ")
_WRONG = "mismatch"
_MOST_BYTES = 1 << 20
_MOST_LINES = 200


class NcclDiagnosticsFacts(TypedDict):
    """Facts that `observe` returns: `lines` of NCCL, each [tag, text]; `seats` of the group."""

    lines: list[list[str]]
    seats: list[int]


@dataclass(frozen=True)
class _Pair:
    """A pair of ranks, and NCCL's words on it."""

    ends: tuple[Rank, Rank]
    what: str
    text: str


class NcclDiagnostics(Check):
    """Lets NCCL test direct copies between the GPUs of each host."""

    name = "nccl_diagnostics"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (FAILED,)
    reads = tuple(sorted((*GROUP_READS, "nccl_library")))
    level = Level.FULL
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round with a group for each host that has several ranks.

        Raises:
            Skip: no host has several ranks with an NCCL that can test itself.
        """
        if cluster.backend != "nccl":
            raise Skip(f"the backend is {cluster.backend}")
        versions = {
            rank.seat: release((facts["loaded"] or {}).get("version"))
            for rank, facts in cluster.facts("nccl_library")
            if facts["cuda"]
        }
        groups = []
        for host in cluster.present_hosts:
            seats = tuple(rank.seat for rank in cluster.ranks_on(host))
            able = all(versions.get(seat, ()) >= _SINCE for seat in seats)
            if len(seats) > 1 and able and collectives_worked(cluster, host):
                groups.append(seats)
        if not groups:
            raise Skip(
                "no host has several ranks with NCCL 2.31 or newer, and collectives that worked"
            )
        return [Round("each-host", tuple(groups), attempt_deadline(cluster))]

    def observe(self, ctx: Context) -> NcclDiagnosticsFacts:
        """Form the group with the diagnostics on, and read what NCCL prints.

        Raises:
            Untested: NCCL printed nothing in this group, or it cannot be read.
        """
        os.environ[_VARIABLE] = "1"
        start = _length()
        tester = Exercise(ctx.breadcrumb, form_world(ctx))
        # The first collective makes the communicator.
        tester.reduce(ctx.round, None, ctx.position, len(ctx.group))
        lines = said(_written(start))
        if ctx.position == 0 and not lines:
            raise Untested(f"NCCL printed nothing about {_VARIABLE}=1")
        return {"lines": lines[:_MOST_LINES], "seats": list(ctx.group)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host with a path that NCCL reports as broken."""
        ranks = {rank.seat: rank for rank in cluster.ranks}
        failed: dict[int, list[_Pair]] = {}
        partial: dict[int, tuple[Rank, str]] = {}
        for rank, facts in cluster.facts(self.name, "each-host"):
            for tag, text in facts["lines"]:
                found = _PAIR.match(text) if tag == "INFO" else None
                members = [ranks.get(seat) for seat in facts["seats"]]
                if found and max(int(found[2]), int(found[3])) < len(members):
                    source, target = members[int(found[2])], members[int(found[3])]
                    if source and target:
                        pair = _Pair((source, target), found[1], text)
                        failed.setdefault(rank.host.id, []).append(pair)
                elif tag == "INFO" and _PARTIAL.match(text):
                    partial[rank.host.id] = rank, text
        for pairs in failed.values():
            yield _finding(pairs)
        for host, (rank, text) in partial.items():
            if host not in failed:
                where = place_of(cluster.ranks_on(rank.host))
                yield Finding(FAILED, text, where, confidence=Confidence.LIKELY)


def said(text: str) -> list[list[str]]:
    """Results in an output of NCCL: tag and text of each line, without its heading and its time."""
    return [[tag, words.strip()] for tag, words in _LINE.findall(text) if tag]


def _finding(pairs: Sequence[_Pair]) -> Finding:
    """The finding on the pairs of one host: wrong data first."""
    first, *_ = sorted(pairs, key=lambda pair: _WRONG not in pair.what)
    common = frozenset.intersection(*(frozenset(r.seat for r in pair.ends) for pair in pairs))
    others = {rank.seat for pair in pairs for rank in pair.ends} - common
    one = len(common) == 1 and len(others) > 1
    named = {rank.seat: rank for pair in pairs for rank in pair.ends}
    more = f" ({len(pairs)} paths in all)" if len(pairs) > 1 else ""
    return Finding(
        FAILED,
        f"{first.text}{more}",
        place_of(rank for seat, rank in named.items() if seat in common or not one),
        {"lines": [pair.text for pair in pairs[:20]]},
        severity=Severity.FAIL if _WRONG in first.what else None,
        confidence=Confidence.LIKELY,
    )


def _length() -> int:
    """Bytes that this process has written to its output so far."""
    return os.fstat(1).st_size


def _written(start: int) -> str:
    """Output of this process from that byte on, which its parent keeps in memory.

    Raises:
        Untested: it is no file that can be read.
    """
    ctypes.CDLL(None).fflush(None)
    size = min(_length() - start, _MOST_BYTES)
    try:
        return os.pread(1, max(0, size), start).decode("utf-8", "replace")
    except OSError as error:
        raise Untested("the output of NCCL cannot be read here") from error
