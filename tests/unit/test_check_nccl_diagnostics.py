"""NCCL's diagnostics: which groups are formed, and what its lines mean."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity, Skip, Untested
from nccl_doctor.checks import nccl_diagnostics
from nccl_doctor.checks.nccl_diagnostics import NcclDiagnostics, said
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only

CHECK = NcclDiagnostics()
OK = "p2p: verified P2P access in both directions between every GPU pair (12 peer accesses)"
ADVICE = "check NVLink state (nvidia-smi nvlink -s)"


def edge(what: str, source: int, target: int, rest: str = "") -> str:
    """A line as `ncclDiagP2pFormatPeerFields` and `ncclDiagP2pReport` write it."""
    fields = f"srcRank={source} srcCudaDev={source} srcNvmlDev={source} "
    fields += f"dstRank={target} dstCudaDev={target} dstNvmlDev={target} path=NVL handle=cuMemFd"
    return f"p2p: {what} {fields} {rest}; {ADVICE}"


def wrong(source: int, target: int) -> str:
    return edge("read mismatch", source, target, "expected=0x80 got=0x12")


def unmapped(source: int, target: int) -> str:
    return edge("peer-memory import failed", source, target, "reason=import")


def ready(*versions: str | None, nproc: int = 4, worked: bool = True) -> Cluster:
    """Hosts with their NCCL, after the collectives."""
    hosts = [f"nd{i}" for i in range(len(versions))]
    made = make_cluster(hosts, nproc, backend="nccl")
    ranks = []
    for rank in made.ranks:
        version = versions[rank.host.id]
        facts: dict[str, Any] = {
            "nccl_library": {
                ALONE: outcome({"loaded": version and {"version": version}, "cuda": "13.0"})
            }
        }
        if worked:
            facts["collectives"] = {"world": outcome({"steps": [], "wrong": []})}
        ranks.append(replace(rank, facts=facts))
    return replace(made, ranks=tuple(ranks))


def reported(*lines: tuple[str, str], printer: int = 4) -> Cluster:
    """Two hosts with four ranks: the lines are those of nd1, printed by one of its ranks."""
    by_rank = {
        rank: {
            "lines": [list(each) for each in lines] if rank == printer else [["OK", OK]],
            "seats": [4, 5, 6, 7] if rank > 3 else [0, 1, 2, 3],
        }
        for rank in range(8)
    }
    return make_cluster(
        ("nd0", "nd1"),
        4,
        check=CHECK.name,
        by_rank=by_rank,
        round_name="each-host",
        backend="nccl",
    )


class TestPlan:
    def test_a_group_for_each_host(self) -> None:
        (each,) = CHECK.plan(ready("2.31.2", "2.32.3"))
        assert each.groups == ((0, 1, 2, 3), (4, 5, 6, 7))

    def test_a_host_with_an_older_nccl_is_left_out(self) -> None:
        (each,) = CHECK.plan(ready("2.30.7", "2.32.3"))
        assert each.groups == ((4, 5, 6, 7),)

    @pytest.mark.parametrize(
        "cluster",
        [
            ready("2.30.7", "2.30.7"),
            ready(None, None),
            ready("2.32.3", nproc=1),
            ready("2.32.3", worked=False),
            replace(ready("2.32.3"), backend="gloo"),
        ],
    )
    def test_nothing_to_ask(self, cluster: Cluster) -> None:
        with pytest.raises(Skip):
            CHECK.plan(cluster)


class TestJudge:
    def test_healthy(self) -> None:
        note = "p2p: temporarily enabled context-wide CUDA peer access rank=0 cudaDev=0; avoid"
        assert judge(CHECK, reported(("OK", OK), ("INFO", note))) == []

    def test_wrong_data_between_two(self) -> None:
        found = only(
            CHECK,
            reported(("INFO", unmapped(1, 2)), ("INFO", wrong(2, 1))),
            "nccl-diagnostics-failed",
            hosts=["nd1"],
            ranks=[5, 6],
        )
        assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
        assert found.message == f"{wrong(2, 1)} (2 paths in all)"

    def test_one_gpu_that_no_other_reaches(self) -> None:
        lines = [("INFO", unmapped(a, b)) for a, b in ((0, 3), (3, 0), (1, 3), (2, 3))]
        found = only(CHECK, reported(*lines), "nccl-diagnostics-failed", hosts=["nd1"], ranks=[7])
        assert found.level is Severity.WARN

    def test_a_summary_alone(self) -> None:
        text = "p2p: only 10/12 GPU-to-GPU peer accesses passed verification"
        found = only(
            CHECK,
            reported(("INFO", text)),
            "nccl-diagnostics-failed",
            hosts=["nd1"],
            ranks=[4, 5, 6, 7],
        )
        assert found.message == text

    def test_ranks_that_are_not_in_the_group(self) -> None:
        assert judge(CHECK, reported(("INFO", wrong(0, 9)))) == []


def test_what_nccl_prints() -> None:
    text = f"""nd1:77:77 [0] NCCL INFO NET/IB : No device found.
nd1:77 NCCL DIAG === NCCL Diagnostics ===
nd1:77 NCCL DIAG [OK]   {OK}
nd1:77 NCCL DIAG [INFO] {wrong(0, 1)}
nd1:77 NCCL DIAG [OK] net bw: skipped (single host or no network transport) in comm 0x7a3f9b
nd1:77 NCCL DIAG NCCL diagnostics completed in 245.3 ms across 8 ranks
"""
    assert said(text) == [
        ["OK", OK],
        ["INFO", wrong(0, 1)],
        ["OK", "net bw: skipped (single host or no network transport)"],
    ]


def test_the_output_of_the_process_is_read_from_where_it_was() -> None:
    kept, log = os.dup(1), os.memfd_create("log")
    try:
        os.dup2(log, 1)
        os.write(1, b"before\n")
        start = nccl_diagnostics._length()
        os.write(1, b"x NCCL DIAG [OK] p2p: fine\n")
        text = nccl_diagnostics._written(start)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert text == "x NCCL DIAG [OK] p2p: fine\n"


def test_an_output_that_cannot_be_read() -> None:
    kept = os.dup(1)
    read, write = os.pipe()
    try:
        os.dup2(write, 1)
        with pytest.raises(Untested, match="cannot be read"):
            nccl_diagnostics._written(0)
    finally:
        os.dup2(kept, 1)
        for each in (kept, read, write):
            os.close(each)
