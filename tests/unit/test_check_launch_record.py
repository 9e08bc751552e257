"""The rules of the check `launch_record`, on made-up clusters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Job, Launch, LaunchProblem, Severity
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import host_launch
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.job import Rendezvous
from nccl_doctor.model.options import Flags
from nccl_doctor.report import text
from nccl_doctor.system.programs import installed
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome, shut_out
from tests.support.findings import everywhere
from tests.support.merging import with_facts
from tests.support.reports import RUN, through_json
from tests.support.rows import each_row

CHECK = CHECKS["launch_record"]
EVERYWHERE = "on every host: export"
THREE = ("nd0", "nd1", "nd2")
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


@pytest.mark.parametrize(("hosts", "nproc"), [(("nd0",), 1), (("nd0",), 8), (THREE, 4)])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_healthy_cluster(hosts: Sequence[str], nproc: int, backend: str) -> None:
    assert judge(make_cluster(hosts, nproc, backend=backend)) == []


def test_observe_names_sources_and_no_values() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nd0", "MASTER_PORT": "29500"}
    facts = CHECK.observe(Context(launch=detect(environ), env=environ))
    assert json.loads(json.dumps(facts)) == {
        "torch": installed("torch"),
        "launcher": "env",
        "sources": {
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "master_addr": "MASTER_ADDR",
            "master_port": "MASTER_PORT",
        },
        "lightning": None,
    }


def test_after_a_trip_through_json() -> None:
    problem = LaunchProblem("launch-bad-value", "RANK=x", {"RANK": "x"}, "`export RANK=3`")
    cluster = change_rank(make_cluster(), 3, launch={"problems": (problem,)})
    launch = cluster.ranks[3].launch
    assert launch is not None
    again = decode(Launch, Node("launch", json.loads(json.dumps(encode(launch)))))
    assert judge(change_rank(cluster, 3, launch=vars(again))) == judge(cluster)


class TestLaunchProblems:
    def problem(self, code: str, *, fatal: bool = True) -> LaunchProblem:
        return LaunchProblem(code, "RANK=x", {"RANK": "x"}, "`export RANK=3`", fatal)

    @pytest.mark.parametrize(
        "code",
        [
            "launch-missing-variable",
            "launch-bad-value",
            "launch-sources-disagree",
            "rank-out-of-range",
            "local-rank-out-of-range",
        ],
    )
    def test_becomes_a_finding_of_its_code(self, code: str) -> None:
        cluster = change_rank(make_cluster(), 3, launch={"problems": (self.problem(code),)})
        finding = only(cluster, code, hosts=["nd1"], ranks=[3])
        assert finding.level is Severity.FAIL
        assert finding.fix == "export RANK=3"
        assert finding.evidence == {"variables": {"RANK": "x"}}

    def test_what_torch_does_not_mind_is_a_warning(self) -> None:
        problems = (self.problem("launch-sources-disagree", fatal=False),)
        cluster = change_rank(make_cluster(), 3, launch={"problems": problems})
        assert only(cluster, "launch-sources-disagree", hosts=["nd1"], ranks=[3]).level is (
            Severity.WARN
        )

    def test_independent_runs_are_information(self) -> None:
        problems = (self.problem("launch-runs-independent", fatal=False),)
        cluster = change_rank(make_cluster(["nd1"]), 1, launch={"problems": problems})
        assert only(cluster, "launch-runs-independent", hosts=["nd1"], ranks=[1]).level is (
            Severity.INFO
        )

    def test_every_code_of_detect_has_its_kind(self) -> None:
        codes = {
            problem.code
            for environ in (
                {"RANK": "x"},
                {"RANK": "2", "WORLD_SIZE": "2"},
                {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
                {"RANK": "0", "WORLD_SIZE": "4", "NNODES": "1", "LOCAL_WORLD_SIZE": "2"},
            )
            for problem in detect(environ).problems
        }
        assert len(codes) == 5
        assert codes <= {kind.code for kind in CHECK.kinds}

    def test_own_view_speaks_of_nobody_else(self) -> None:
        cluster = make_cluster(absent_nodes=[1], complete=False)
        cluster = change_rank(
            cluster, 0, launch={"problems": (self.problem("launch-bad-value"),), "nnodes": 7}
        )
        only(cluster, "launch-bad-value", hosts=["nd0"], ranks=[0])


class TestLocalRankUnset:
    def test_unset_on_a_host_with_several_ranks(self) -> None:
        cluster = everywhere(make_cluster(backend="nccl"), [2, 3], local_rank=None)
        finding = only(cluster, "launch-missing-variable", hosts=["nd1"], ranks=[2, 3])
        assert finding.level is Severity.WARN

    def test_unset_with_one_rank_per_host(self) -> None:
        cluster = make_cluster(THREE, nproc=1, backend="nccl")
        assert judge(everywhere(cluster, range(3), local_rank=None)) == []

    def test_each_task_sees_a_gpu_of_its_own(self) -> None:
        env = {2: {"CUDA_VISIBLE_DEVICES": "0"}, 3: {"CUDA_VISIBLE_DEVICES": "1"}}
        cluster = make_cluster(backend="nccl", env=env)
        assert judge(everywhere(cluster, [2, 3], local_rank=None)) == []

    def test_gloo_does_not_need_it(self) -> None:
        assert judge(everywhere(make_cluster(), [2, 3], local_rank=None)) == []

    def test_two_processes_with_one_rank_have_a_worse_fault(self) -> None:
        cluster = everywhere(make_cluster(backend="nccl"), [2, 3], local_rank=None)
        assert judge(change_rank(cluster, 3, rank=2)) == []


class TestRunId:
    def test_run_id(self) -> None:
        cluster = everywhere(make_cluster(THREE), range(4), run_id="a")
        cluster = everywhere(cluster, [4, 5], run_id="b")
        finding = only(cluster, "launch-run-id-differs", hosts=["nd2"])
        assert finding.message == "--rdzv-id=b, elsewhere --rdzv-id=a"

    def test_of_the_torchrun_that_our_launcher_stands_for(self) -> None:
        flags = Flags(nnodes=3, any_node_rank=True, run_id="none")
        cluster = make_cluster(THREE, 1)
        for seat, run_id in enumerate(("none", "yesterday", "none")):
            launch = host_launch(replace(flags, run_id=run_id), 1, is_master=seat == 0)
            cluster = change_rank(cluster, seat, launch=vars(launch))
        only(cluster, "launch-run-id-differs", hosts=["nd1"])

    def test_run_ids_of_other_launchers_are_not_compared(self) -> None:
        cluster = everywhere(make_cluster(), [2, 3], run_id="b", launcher="srun")
        assert judge(everywhere(cluster, [0, 1], run_id="a", launcher="srun")) == []


class TestBackends:
    """What hosts were told by --backend."""

    def told(self, *backends: str):
        cluster = make_cluster(THREE, len(backends) // 3)
        for seat, backend in enumerate(backends):
            cluster = change_rank(cluster, seat, backend=backend)
        return cluster

    @pytest.mark.parametrize("other", ["auto", ""])
    def test_one_that_is_named_and_others_that_say_nothing(self, other: str) -> None:
        assert judge(self.told("gloo", other, other)) == []
        assert judge(self.told(other, other, other)) == []

    def test_the_minority_is_named(self) -> None:
        cluster = self.told("nccl", "nccl", "nccl", "nccl", "gloo", "gloo")
        finding = only(cluster, "backend-option-differs", hosts=["nd2"], ranks=[4, 5])
        assert finding.message == "--backend=gloo, elsewhere --backend=nccl; gloo was examined"
        assert finding.fix == "# --backend nccl (in the line that starts the job, as elsewhere)"
        assert finding.level is Severity.FAIL

    def test_a_tie_names_all(self) -> None:
        cluster = self.told("nccl", "gloo", "auto")
        finding = only(cluster, "backend-option-differs", hosts=["nd0", "nd1"], ranks=[0, 1])
        assert "equally divided" in finding.message

    def test_a_view_of_one_host_says_nothing_of_others(self) -> None:
        assert judge(replace(self.told("nccl", "gloo", "gloo"), complete=False)) == []


class TestWhereNobodySaysWhereToMeet:
    def cluster(self, *guessed: str):
        by = {
            "master_addr": "derived from SLURM_JOB_NODELIST",
            "master_port": "derived from SLURM_JOB_ID",
        }
        cluster = make_cluster()
        for seat in range(4):
            sources = {name: by[name] for name in guessed}
            cluster = change_rank(cluster, seat, launch={"launcher": "srun", "sources": sources})
        return cluster

    def test_one_note_says_by_what(self) -> None:
        found = only(self.cluster("master_addr", "master_port"), "master-not-set")
        assert found.level is Severity.INFO
        assert found.message == (
            "MASTER_ADDR not set, nd0 by SLURM_JOB_NODELIST; "
            "MASTER_PORT not set, 29500 by SLURM_JOB_ID"
        )
        assert found.fix == f"{EVERYWHERE} MASTER_ADDR=nd0 MASTER_PORT=29500 (before the launch)"

    def test_a_name_that_a_host_does_not_know_is_no_fix(self) -> None:
        """Slurm's NodeName is what slurm.conf says; nd1 could not look it up, and never came in."""
        found = {"query": "nd0", "error": "", "took_s": [0.001], "timed_out": False}
        for answers, fix in ((["192.168.77.1"], "nd0"), ([], "192.168.77.1")):
            looked = {
                name: {
                    "master": {**found, "answers": seen},
                    "interfaces": [["eth0", [f"192.168.77.{node + 1}"]]],
                }
                for node, (name, seen) in enumerate((("nd0", ["192.168.77.1"]), ("nd1", answers)))
            }
            cluster = with_facts(self.cluster("master_addr"), "master_addr", looked)
            (note,) = judge(shut_out(cluster, "nd1"))
            assert note.fix == f"{EVERYWHERE} MASTER_ADDR={fix} (before the launch)"

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [("n[1-2]r[3-4]", "n1"), ("n[01]r[3-4]", "n01]r[3"), ("n[1-2]r3", ""), ("a,b[1-2]", "")],
    )
    def test_lightning_makes_a_host_that_is_not_there(self, nodes: str, first: str) -> None:
        """Lightning 2.6.6 took n1 of n[1-2]r[3-4], whose hosts are n1r3, n1r4, n2r3 and n2r4."""
        cluster = self.cluster("master_addr", "master_port")
        for seat in range(4):
            cluster = change_rank(cluster, seat, env={"SLURM_NODELIST": nodes})
        assert only(cluster, "master-not-set").level is Severity.INFO
        seen = {CHECK.name: {ALONE: outcome({"lightning": "2.6.6"})}}
        found = only(change_rank(cluster, 0, facts=seen), "master-not-set")
        assert found.level is (Severity.WARN if first else Severity.INFO)
        words = f"; Lightning 2.6.6 makes {first} of {nodes}, and no host has that name"
        assert found.message.endswith(words) == bool(first)
        assert found.fix == f"{EVERYWHERE} MASTER_ADDR=nd0 MASTER_PORT=29500 (before the launch)"

    def test_what_is_told_is_not_in_it(self) -> None:
        found = only(self.cluster("master_port"), "master-not-set")
        assert found.message == "MASTER_PORT not set, 29500 by SLURM_JOB_ID"
        assert found.fix == f"{EVERYWHERE} MASTER_PORT=29500 (before the launch)"

    def test_without_a_meeting_point_there_is_nothing_to_say(self) -> None:
        cluster = self.cluster()
        for seat in range(4):
            cluster = change_rank(cluster, seat, launch={"master_addr": None})
        assert judge(cluster) == []


# --- the store of init_method ---


@each_row(
    ("launcher", "agent", "torch", "job", "level"),
    [
        ("torchrun", True, "2.13.0+cpu", {}, "fail"),
        ("accelerate", True, "2.4.1", {}, "fail"),
        ("nccl-doctor", False, "2.13.0", {"launcher": "torchrun"}, "fail"),
        ("torchrun", True, "2.14.1", {}, ""),
        ("torchrun", True, None, {}, ""),
        ("torchrun", False, "2.13.0", {}, ""),
        ("ray", True, "2.13.0", {}, ""),
        ("torchrun", True, "2.13.0", {"init_store": ""}, ""),
        ("nccl-doctor", False, "2.13.0", {"launcher": "deepspeed"}, ""),
    ],
)
def test_a_store_that_nobody_serves(
    launcher: str, agent: bool, torch: str | None, job: Mapping[str, str], level: str
) -> None:
    asked = Job(**{"init_store": "nd0:29777", **job})
    cluster = everywhere(make_cluster(job=asked), range(4), launcher=launcher, agent_store=agent)
    seen = {CHECK.name: {ALONE: outcome({"torch": torch})}}
    found = [each.message for each in judge(change_rank(cluster, 0, facts=seen))]
    words = f"tcp://nd0:29777 is not at MASTER_PORT, and torch is {torch}"
    assert found == ([words] if level else [])


def test_ranks_of_c10d_may_have_a_store_apart() -> None:
    job = Job(launcher="torchrun", init_store="nd0:29777", rendezvous=Rendezvous("c10d", "nd0"))
    seen = {CHECK.name: {ALONE: outcome({"torch": "2.13.0"})}}
    cluster = change_rank(make_cluster(job=job), 0, facts=seen)
    only(cluster, "init-method-not-served")
    other = {CHECK.name: {ALONE: outcome({"torch": "2.4.1"})}}
    found = only(change_rank(cluster, 1, facts=other), "init-method-not-served")
    assert found.message.endswith("torch is 2.4.1"), "the older of two"
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert judge(change_rank(cluster, 0, env=apart)) == []


# --- variables of torch that tasks lack ---


def tasks(launcher: str, sources: Mapping[str, str], **launch: Any) -> Cluster:
    cluster = make_cluster()
    for seat in range(4):
        record = {"launcher": launcher, "sources": dict(sources), **launch}
        cluster = change_rank(cluster, seat, launch=record)
    return cluster


OF_SLURM = {"rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID", "world_size": "SLURM_NTASKS"}
OF_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
}
OF_HYDRA = {
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "master_addr": "MASTER_ADDR",
    "local_rank": "derived from WORLD_SIZE",
}


@each_row(
    ("launcher", "sources", "line"),
    [
        (
            "srun",
            OF_SLURM,
            "# srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
            "exec COMMAND'",
        ),
        (
            "srun",
            {**OF_SLURM, "master_addr": "derived from X", "master_port": "derived from Y"},
            "# srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
            "MASTER_ADDR=nd0 MASTER_PORT=29500 exec COMMAND'",
        ),
        (
            "mpirun",
            OF_MPI,
            "# mpirun bash -c 'RANK=$OMPI_COMM_WORLD_RANK "
            "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE exec COMMAND'",
        ),
        ("mpi", OF_HYDRA, "# mpiexec bash -c 'RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE exec COMMAND'"),
    ],
)
def test_tasks_that_have_no_rank_for_torch(launcher: str, sources: Mapping[str, str], line: str):
    notes = [each for each in judge(tasks(launcher, sources)) if each.code == "rank-not-set"]
    (found,) = notes
    assert (found.level, found.where.hosts) == (Severity.INFO, ())
    assert [step.command for step in found.fix.steps] == [line]
    assert sources["rank"] in found.message


@each_row(
    ("launcher", "sources"),
    [
        ("srun", {**OF_SLURM, "rank": "RANK", "world_size": "WORLD_SIZE"}),
        ("torchrun", {"rank": "RANK", "world_size": "WORLD_SIZE"}),
        ("nccl-doctor", {"rank": "nccl-doctor", "world_size": "derived from --nnodes"}),
        ("env", {}),
    ],
)
def test_ranks_that_torch_can_read(launcher: str, sources: Mapping[str, str]):
    assert "rank-not-set" not in [each.code for each in judge(tasks(launcher, sources))]


def test_ranks_that_are_numbered_by_their_hosts() -> None:
    cluster = change_rank(make_cluster(), 3, launch={"launcher": "env"})
    assert cluster.ranks[3].launch is not None
    sources = {**cluster.ranks[3].launch.sources, "rank": "derived from NODE_RANK"}
    (found,) = judge(change_rank(cluster, 3, launch={"launcher": "env", "sources": sources}))
    assert (found.code, found.level) == ("rank-not-set", Severity.INFO)
    assert found.kind.title.startswith("The tasks have no RANK: the examination numbered them by ")
    assert [step.command for step in found.fix.steps] == [
        "# export RANK=$((NODE_RANK * NUMBER + LOCAL_RANK))"
    ]


def test_it_is_shown_beside_the_verdict_though_it_is_information():
    cluster = tasks("srun", OF_SLURM)
    report = through_json(conclude(cluster, [CHECK], run=RUN))
    for quiet in (False, True):
        shown = text.render(report, quiet=quiet)
        assert "[rank-not-set]" in shown
        assert "WORLD_SIZE=$SLURM_NTASKS exec COMMAND'" in shown
