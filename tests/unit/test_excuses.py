"""What is wrong with an address that the program derived itself is no failure; what else is, is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Finding, Severity, Where
from nccl_doctor.checks.limits import OPEN_FILES
from nccl_doctor.checks.port import PORT_IN_USE, PORT_REFUSED
from nccl_doctor.checks.ranks import HOST_ABSENT
from nccl_doctor.judge.causes import excuse
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, shut_out
from tests.support.knocks import facts as knocks
from tests.support.knocks import tried
from tests.support.merging import coordinators, own_view, with_facts
from tests.support.reports import RUN
from tests.support.rows import each_row

WORKERS = ("llm-worker-0", "llm-worker-1")
LAUNCHER = "192.168.77.9"
"""mpirun runs there, and no rank: the launcher pod of an MPIJob, or a login node."""
BY_MPIRUN = {
    "master_addr": "derived from OMPI_MCA_orte_hnp_uri",
    "master_port": "derived from PMIX_NAMESPACE",
}
CHOSEN = [CHECKS[name] for name in ("launch_record", "master_addr", "port", "ranks")]
REFUSED = tried("refused", address=LAUNCHER)


def mpi_job(**launch: Any) -> Cluster:
    """Facts of an MPIJob of two workers, as if its reports were together."""
    cluster = make_cluster(WORKERS, 2)
    launch = {
        "launcher": "mpirun",
        "node_rank": None,
        "master_addr": LAUNCHER,
        "sources": BY_MPIRUN,
        **launch,
    }
    for seat in range(4):
        cluster = change_rank(cluster, seat, launch=launch)
    found = {"query": LAUNCHER, "answers": [LAUNCHER], "error": "", "took_s": [0.001]}
    looked: Mapping[str, Any] = {
        worker: {
            "master_addr": LAUNCHER,
            "master": {**found, "timed_out": False},
            "reverse": [],
            "no_route": [],
            "interfaces": [["eth0", [f"192.168.77.{node + 1}"]]],
        }
        for node, worker in enumerate(WORKERS)
    }
    called = {
        WORKERS[0]: knocks(REFUSED, "self", master_addr=LAUNCHER),
        WORKERS[1]: knocks(REFUSED, master_addr=LAUNCHER),
    }
    return with_facts(with_facts(cluster, "master_addr", looked), "port", called)


def views(**launch: Any) -> dict[str, Cluster]:
    """The report of rank 0's host, that of the other one by itself, and the two together."""
    whole = mpi_job(**launch)
    return {
        "rank 0": shut_out(coordinators(whole, 1), WORKERS[1]),
        "the other": own_view(whole, 1),
        "merged": shut_out(whole, WORKERS[1]),
    }


def report_of(cluster: Cluster) -> Report:
    return conclude(cluster, CHOSEN, run=RUN)


@each_row("view", ["rank 0", "the other", "merged"])
def test_the_launcher_pod_of_an_mpi_job_runs_no_rank(view: str) -> None:
    report = report_of(views()[view])
    assert [found.code for found in report.findings if found.level is Severity.FAIL] == []
    (root,) = report.root_causes
    assert (root.code, root.level) == ("master-not-set", Severity.WARN)
    assert root.message.startswith(f"MASTER_ADDR not set, {LAUNCHER} by OMPI_MCA_orte_hnp_uri; ")
    assert root.message.endswith("; not all ranks met there")
    right = "ADDRESS" if view == "the other" else "192.168.77.1"
    assert f"# mpirun -x MASTER_ADDR={right} -x MASTER_PORT=29500 (" in root.fix
    assert (report.verdict, report.exit_code) == ("unknown", 3)


@each_row(
    ("view", "code"),
    [("rank 0", "addr-not-on-master"), ("the other", "port-refused")],
)
def test_an_address_that_somebody_gave_is_a_failure(view: str, code: str) -> None:
    sources = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    report = report_of(views(sources=sources)[view])
    assert [found.code for found in report.root_causes] == [code]
    assert (report.verdict, report.exit_code) == ("fail", 1)


def test_one_that_only_some_ranks_were_given_is_no_choice_of_ours() -> None:
    cluster = change_rank(views()["merged"], 0, launch={"sources": {"master_addr": "MASTER_ADDR"}})
    assert report_of(cluster).verdict == "fail"


def slurm_job(last: dict[str, Any], **port: Any) -> Cluster:
    """nd0 is the first host of Slurm's list, has that address, and nd1 did not get in."""
    cluster = make_cluster(("nd0", "nd1"), 2)
    sources = {
        "master_addr": "derived from SLURM_JOB_NODELIST",
        "master_port": "derived from SLURM_JOB_ID",
    }
    for seat in range(4):
        cluster = change_rank(cluster, seat, launch={"launcher": "srun", "sources": sources})
    by_host = {"nd0": knocks(server="self", **port), "nd1": knocks(last)}
    return shut_out(with_facts(cluster, "port", by_host), "nd1")


def test_the_right_address_excuses_no_firewall() -> None:
    (root,) = report_of(slurm_job(tried("dropped"))).root_causes
    assert (root.code, root.level) == ("port-blocked", Severity.FAIL)
    assert root.where == Where(links=(("nd1", "nd0"),))


def test_a_derived_port_that_is_taken() -> None:
    held = {"bind_errno": 98, "holder": {"pid": 7, "command": "x", "state": "LISTEN", "uid": 0}}
    report = report_of(slurm_job(tried("connected", "other", reply="SSH-2.0"), **held))
    assert report.verdict == "unknown"
    (root,) = report.root_causes
    assert (root.code, root.fix) == (
        "master-not-set",
        "on every host: # export MASTER_ADDR=ADDRESS MASTER_PORT=29500 (before the launch; ADDRESS "
        "is that of rank 0's host)",
    )
    (taken,) = [found for found in report.findings if found.code == "port-in-use"]
    assert (taken.level, taken.explained_by) == (Severity.WARN, "master-not-set")


def test_a_derived_port_among_the_ephemeral_ones_is_information() -> None:
    cluster = make_cluster(("nd0",), 2)
    for seat in range(2):
        sources = {"master_port": "derived from SLURM_JOB_ID"}
        cluster = change_rank(cluster, seat, launch={"launcher": "srun", "sources": sources})
    by_host = {"nd0": knocks(server="self", ephemeral=(1024, 65535))}
    (found,) = CHECKS["port"].judge(with_facts(cluster, "port", by_host))
    assert (found.code, found.level) == ("port-ephemeral", Severity.INFO)


# -- the rule itself -------------------------------------------------------------------------------

HERE = Where(hosts=("nd1",))
NOT_SET = next(kind for kind in CHECKS["launch_record"].kinds if kind.code == "master-not-set")
NOTE = Finding(NOT_SET, "MASTER_ADDR not set")
REFUSES = Finding(PORT_REFUSED, "refuses", HERE, excused_by="master-not-set")
ABSENT = Finding(HOST_ABSENT, "1 of 2 hosts", HERE, explained_by="port-refused")


def levels(*findings: Finding) -> dict[str, tuple[str, str | None]]:
    return {f.message: (f.level.value, f.explained_by) for f in excuse(findings)}


def test_what_an_excused_failure_explains_is_excused_with_it() -> None:
    assert levels(NOTE, REFUSES, ABSENT) == {
        "MASTER_ADDR not set": ("warn", None),
        "refuses": ("warn", "master-not-set"),
        "1 of 2 hosts": ("warn", "port-refused"),
    }


def test_where_nothing_failed_the_note_stays_a_note() -> None:
    warned = replace(REFUSES, severity=Severity.WARN)
    assert levels(NOTE, warned)["MASTER_ADDR not set"] == ("info", None)
    assert levels(NOTE, warned)["refuses"] == ("warn", None)


def test_without_the_note_there_is_nothing_to_refer_to() -> None:
    assert levels(REFUSES) == {"refuses": ("warn", None)}


def test_another_failure_stays_one_with_all_that_it_may_have_caused() -> None:
    other = Finding(OPEN_FILES, "1024 open files", HERE, severity=Severity.FAIL)
    assert levels(NOTE, REFUSES, other)["1024 open files"] == ("fail", None)
    known = replace(REFUSES, message="refuses there", excused_by="")
    assert levels(NOTE, REFUSES, known, ABSENT) == {
        "MASTER_ADDR not set": ("warn", None),
        "refuses": ("warn", "master-not-set"),
        "refuses there": ("fail", None),
        "1 of 2 hosts": ("fail", "port-refused"),
    }
    held = Finding(PORT_IN_USE, "held", HERE, explained_by="port-refused")
    assert levels(replace(ABSENT, explained_by="port-in-use"), held, REFUSES)["1 of 2 hosts"] == (
        "warn",
        "port-in-use",
    )
