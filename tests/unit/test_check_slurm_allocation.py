"""A master that Slurm did not give to the job."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Skip
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.checks.slurm_allocation import SlurmAllocation
from nccl_doctor.judge.conclusion import conclude
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, shut_out, with_round
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
    made = make_cluster(names, check="slurm_allocation", by_host=by_host, **fields)
    return shut_out(by_srun(made), *out)


def by_srun(made: Cluster) -> Cluster:
    """The same, where each rank reads MASTER_ADDR from its environment."""
    told = {"launcher": "srun", "sources": {"master_addr": "MASTER_ADDR"}}
    for rank in made.present:
        made = change_rank(made, rank.seat, launch=told)
    return made


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


C10D = {"launcher": "nccl-doctor", "sources": {"master_addr": "--rdzv-endpoint"}}


def lone(seen: dict[str, Any], **launch: Any) -> Cluster:
    """What the first host knows where nobody ever met: its own facts only."""
    by_host = {"nd0": seen}
    made = make_cluster(("nd0",), 1, check="slurm_allocation", by_host=by_host, complete=False)
    return change_rank(made, 0, launch={**C10D, "master_addr": seen["master"], **launch})


def test_an_endpoint_outside_as_a_number_is_known_to_each_host_alone() -> None:
    seen = view("10.1.1.1", "10.1.1.1")
    told = {"variables": ["SLURM_SRUN_COMM_HOST"], "outside": True, "first": ["192.168.77.1"]}
    found = only(CHECK, lone({**seen, **told}), "master-outside-allocation", hosts=["nd0"])
    assert found.message.startswith("the master is 10.1.1.1, SLURM_SRUN_COMM_HOST; ")
    assert found.fix.startswith("on every host: # --rdzv-endpoint nd0:29500 ")
    assert "MASTER_ADDR" not in found.fix
    for outside in (False, None):  # a host of the list has the address, or may have
        assert judge(CHECK, lone({**seen, **told, "outside": outside})) == []


def test_the_address_of_slurm_in_an_endpoint_is_read_by_the_shell() -> None:
    told = {"variables": ["SLURM_SUBMIT_HOST"], "outside": True, "first": []}
    found = only(
        CHECK,
        lone({**view("10.1.1.1", "10.1.1.1"), **told}),
        "master-outside-allocation",
        hosts=["nd0"],
    )
    assert "# --rdzv-endpoint $(scontrol show node nd0 | " in found.fix
    assert "cut -d= -f2):29500" in found.fix


def test_a_port_that_refuses_outside_the_allocation_is_no_second_cause() -> None:
    told = {"variables": ["SLURM_LAUNCH_NODE_IPADDR"], "outside": True, "first": ["192.168.77.1"]}
    seen = {**view("10.1.1.1", "10.1.1.1"), **told}
    refused = {
        "address": "10.1.1.1",
        "outcome": "refused",
        "detail": "",
        "answer": "",
        "reply": "",
    }
    port = {
        "master_addr": "10.1.1.1",
        "port": 29500,
        "server": "other",
        "bind_errno": None,
        "knock": {"last": refused, "passed": [], "seconds": 1.0},
    }
    made = with_round(lone(seen), "port", "alone", {"nd0": port})
    report = conclude(made, [CHECK, CHECKS["port"]], run=RUN)
    assert [cause.code for cause in report.root_causes] == ["master-outside-allocation"]


def test_a_name_that_does_not_resolve_is_not_recommended() -> None:
    known, unknown = ({**view("login1", "10.1.1.1"), "first": a} for a in (["10.0.0.1"], []))
    for other, resolves in ((known, True), (unknown, False)):
        by_host = {"nd0": known, "nd1": other}
        made = by_srun(make_cluster(tuple(by_host), check="slurm_allocation", by_host=by_host))
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


@pytest.mark.parametrize(
    ("nodes", "variable", "master", "told"),
    [
        ("127.0.0.[1-2]", "SLURM_SRUN_COMM_HOST", "127.0.0.9", (["SLURM_SRUN_COMM_HOST"], True)),
        ("127.0.0.[1-2]", "SLURM_SUBMIT_HOST", "127.0.0.9", (["SLURM_SUBMIT_HOST"], True)),
        ("127.0.0.1,localhost", "SLURM_SUBMIT_HOST", "127.0.0.9", (["SLURM_SUBMIT_HOST"], True)),
        # A host of the list has it, by another name; one of them is not known.
        ("nd-none,localhost", "SLURM_SUBMIT_HOST", "127.0.0.9", (["SLURM_SUBMIT_HOST"], None)),
        ("localhost", "SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1", None),
        ("127.0.0.[1-2]", "SLURM_SUBMIT_DIR", "127.0.0.9", ([], None)),
    ],
)
def test_the_hosts_of_the_list_are_looked_up_where_a_variable_leads_to_the_master(
    nodes: str, variable: str, master: str, told: tuple[list[str], bool | None] | None
) -> None:
    env = {"SLURM_JOB_NODELIST": nodes, variable: master}
    found = CHECK.observe(Context(launch=Launch("srun", master_addr=master), env=env))
    expected = told or ([variable], False)
    assert (found["variables"], found["outside"]) == expected


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
