"""A master that Slurm did not give to the job."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Skip
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.checks.slurm_allocation import SlurmAllocation
from nccl_doctor.judge.conclusion import conclude
from tests.support.clusters import make_cluster, shut_out
from tests.support.findings import judge, only
from tests.support.reports import RUN

CHECK = SlurmAllocation()


def view(master: str, *answers: str, launch: str = "10.1.1.1") -> dict[str, Any]:
    return {
        "hosts": ["nd0", "nd1"],
        "master": master,
        "answers": list(answers),
        "launch_node": launch,
    }


def cluster(seen: dict[str, Any], *out: str, **fields: Any) -> Cluster:
    names = ("nd0", "nd1")
    by_host = dict.fromkeys(names, seen)
    return shut_out(make_cluster(names, check="slurm_allocation", by_host=by_host, **fields), *out)


def test_a_login_node_by_name() -> None:
    found = only(
        CHECK,
        cluster(view("login1", "10.1.1.1"), "nd1"),
        "master-outside-allocation",
        hosts=["nd0", "nd1"],
    )
    assert "login1, SLURM_LAUNCH_NODE_IPADDR" in found.message
    assert "export MASTER_ADDR=nd0" in found.fix
    assert "scontrol" in found.fix


def test_a_login_node_by_address() -> None:
    seen = view("10.1.1.1", "10.1.1.1")
    only(CHECK, cluster(seen, "nd1"), "master-outside-allocation", hosts=["nd0", "nd1"])


def test_a_name_that_does_not_resolve_is_not_recommended() -> None:
    known, unknown = ({**view("login1", "10.1.1.1"), "first": a} for a in (["10.0.0.1"], []))
    for other, resolves in ((known, True), (unknown, False)):
        by_host = {"nd0": known, "nd1": other}
        made = make_cluster(tuple(by_host), check="slurm_allocation", by_host=by_host)
        found = only(
            CHECK, shut_out(made, "nd1"), "master-outside-allocation", hosts=["nd0", "nd1"]
        )
        assert found.fix.startswith("on every host: export MASTER_ADDR=nd0;") is resolves
        assert ("scontrol show node nd0 | grep -o 'NodeAddr=[^ ]*'" in found.fix) is not resolves


@pytest.mark.parametrize(
    "seen",
    [
        view("nd0", "192.168.77.1"),
        view("nd0.cluster.example.org", "192.168.77.1"),
        view("ND1"),
        view("nd0-ib", "192.168.77.1"),  # a second name of a host of the job
        view("10.9.9.9", "10.9.9.9"),  # some other address: check master_addr knows more
        view("localhost", "127.0.0.1"),
        view(""),
    ],
)
def test_hosts_of_the_job_are_fine(seen: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(seen, "nd1")) == []


def test_where_everybody_came_in_the_name_leads_somewhere() -> None:
    assert judge(CHECK, cluster(view("head-ib", "10.2.2.2"))) == []


def test_the_launch_node_may_be_the_first_host_that_sent_no_report() -> None:
    seen = view("10.1.1.1", "10.1.1.1")
    alone = make_cluster(("nd1",), check="slurm_allocation", by_host={"nd1": seen}, complete=False)
    assert judge(CHECK, alone) == []


def test_what_is_read() -> None:
    env = {"SLURM_JOB_NODELIST": "nd[0-1]", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}
    launch = Launch("srun", master_addr="127.0.0.1")
    found = CHECK.observe(Context(launch=launch, env=env))
    assert found["hosts"] == ["nd0", "nd1"]
    assert (found["master"], found["answers"]) == ("127.0.0.1", ["127.0.0.1"])
    assert found["first"] == []  # nobody knows that name here
    listed = {**env, "SLURM_JOB_NODELIST": "localhost,nd1"}
    assert (
        CHECK.observe(Context(launch=Launch("srun", master_addr="nd1"), env=listed))["first"]
        is None
    )
    assert CHECK.observe(Context(launch=launch, env=listed))["first"]
    c10d = {**env, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "127.0.0.2:29400"}
    assert CHECK.observe(Context(launch=launch, env=c10d))["master"] == "127.0.0.2"
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=launch, env={}))


def fewer(*absent: int, nodelist: tuple[str, ...] = ("nd0", "nd1"), **env: str) -> Cluster:
    """Four hosts are expected; Slurm has a list of its own."""
    names = ("nd0", "nd1", "nd2", "nd3")
    seen = {**view("nd0", "192.168.77.1"), "hosts": list(nodelist)}
    by_host = dict.fromkeys(names, seen)
    made = make_cluster(
        names, 1, check="slurm_allocation", by_host=by_host, absent_nodes=absent, env={0: env}
    )
    return made


def test_a_job_that_expects_more_hosts_than_the_allocation_has() -> None:
    made = fewer(2, 3)
    found = only(CHECK, made, "nnodes-beyond-allocation", nodes=[2, 3])
    assert found.message == (
        "the job expects 4 hosts; SLURM_JOB_NODELIST has 2, and all of them are here"
    )
    assert "--nnodes 2" in found.fix
    report = conclude(made, [CHECK, Ranks()], run=RUN)
    assert [cause.code for cause in report.root_causes] == ["nnodes-beyond-allocation"]


@pytest.mark.parametrize(
    "made",
    [
        fewer(),
        fewer(3),  # two agents on one host: there is room for the fourth
        fewer(1, 2, 3),  # a host of the list is missing itself
        fewer(2, 3, nodelist=("nd0", "nd1", "nd2", "nd3")),
        fewer(2, 3, nodelist=("nd0", "node1")),  # the host has another name there
        fewer(2, 3, SLURM_HET_SIZE="2"),
    ],
)
def test_hosts_that_may_still_come_are_not_too_many(made: Cluster) -> None:
    assert judge(CHECK, made) == []
