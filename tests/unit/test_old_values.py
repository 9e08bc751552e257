"""Undo of `export` and `unset`: it restores the values that the hosts have."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.api import Command, Finding, Fix, Layer, On, Step, Where, export, shell
from nccl_doctor.judge.old_values import put_back
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.report import text
from tests.support.ci import report_of
from tests.support.clusters import make_cluster
from tests.support.reports import kind
from tests.support.rows import each_row

HOSTS = ("ux0", "ux1", "ux2")
BAD = kind("bad-name", Layer.ENV)
SET = export(NCCL_SOCKET_IFNAME="=eth0")


def cluster_of(*values: str | None, nproc: int = 1) -> Cluster:
    """A host for each value of NCCL_SOCKET_IFNAME."""
    cluster = make_cluster(HOSTS[: len(values)], nproc=nproc)
    given = dict(zip(HOSTS, values, strict=False))
    ranks = [
        replace(rank, env={"NCCL_SOCKET_IFNAME": value} if value is not None else {})
        for rank in cluster.ranks
        for value in (given[rank.host.label],)
    ]
    return replace(cluster, ranks=tuple(ranks))


def steps_after(cluster: Cluster, *steps: Step) -> tuple[Step, ...]:
    (found,) = put_back([Finding(BAD, "m", Where(hosts=("ux1",)), fix=Fix(*steps))], cluster)
    assert isinstance(found.fix, Fix)
    return found.fix.steps


@each_row("step, undo", {
    "set before": (SET, "export NCCL_SOCKET_IFNAME=eth9"),
    "taken away": (Step(shell("unset NCCL_SOCKET_IFNAME")), "export NCCL_SOCKET_IFNAME=eth9"),
    "a hole": (
        Step(shell("# export NCCL_SOCKET_IFNAME=NIC"), undo=shell("unset NCCL_SOCKET_IFNAME")),
        "export NCCL_SOCKET_IFNAME=eth9",
    ),
    "with one that was not set": (
        export(NCCL_SOCKET_IFNAME="a", GLOO_SOCKET_IFNAME="b"),
        "export NCCL_SOCKET_IFNAME=eth9 && unset GLOO_SOCKET_IFNAME",
    ),
    "another variable": (export(GLOO_SOCKET_IFNAME="b"), "unset GLOO_SOCKET_IFNAME"),
    "an undo of its own": (
        replace(SET, undo=shell("export NCCL_SOCKET_IFNAME=x")), "export NCCL_SOCKET_IFNAME=x",
    ),
    "more than that": (Step(shell("export NCCL_SOCKET_IFNAME=a && true")), ""),
    "no shell takes it": (Step(shell("export NCCL_SOCKET_IFNAME='a")), ""),
    "another command": (Step(shell("ip link set eth0 up"), undo=shell("x")), "x"),
}.values())  # fmt: skip
def test_undo_of_a_step(step, undo):
    (after,) = steps_after(cluster_of("eth9", "eth9"), step)
    assert after == replace(step, undo=Command(undo))


def test_other_ways_have_it_too():
    fix = Fix(text="ask the owner", alternatives=[Fix(replace(SET, on=On.HERE))])
    (found,) = put_back(
        [Finding(BAD, "m", Where(hosts=("ux1",)), fix=fix)], cluster_of(None, "=it's")
    )
    (step,) = found.fix.alternatives[0].steps
    assert (found.fix, step.on) == ("ask the owner", On.HERE)
    assert step.undo == """export NCCL_SOCKET_IFNAME='=it'"'"'s'"""


def test_the_fix_of_a_kind_has_it_too():
    finding = Finding(replace(BAD, fix=Fix(SET)), "m", Where(hosts=("ux1",)))
    (found,) = put_back([finding], cluster_of("eth9", "eth9"))
    assert found.fix.steps[0].undo == "export NCCL_SOCKET_IFNAME=eth9"
    assert put_back([finding], cluster_of(None, None)) == [finding]


def test_what_is_not_known_has_no_undo():
    (after,) = steps_after(cluster_of("***", "***"), SET)
    assert after.undo == ""
    cluster = cluster_of("eth9", nproc=2)
    first, second = cluster.ranks
    ranks = (first, replace(second, env={"NCCL_SOCKET_IFNAME": "eth8"}))
    assert steps_after(replace(cluster, ranks=ranks), SET)[0].undo == ""


def test_hosts_with_other_values_get_their_own_and_the_screen_says_it_once():
    cluster = cluster_of("eth9", None, "eth9")
    steps = steps_after(cluster, SET)
    assert [(step.on, step.undo) for step in steps] == [
        (("ux0", "ux2"), "export NCCL_SOCKET_IFNAME=eth9"),
        (("ux1",), "unset NCCL_SOCKET_IFNAME"),
    ]
    report = report_of(Finding(BAD, "m", Where(hosts=("ux1",)), fix=Fix(*steps)))
    shown = text.render(report)
    assert shown.count("export NCCL_SOCKET_IFNAME='=eth0'") == 1


def test_a_host_that_said_nothing_keeps_what_the_rule_wrote():
    cluster = cluster_of("eth9", "eth9")
    silent = replace(cluster.ranks[1], reported=False, env={})
    steps = steps_after(replace(cluster, ranks=(cluster.ranks[0], silent)), SET)
    assert steps[1].undo == "unset NCCL_SOCKET_IFNAME"
