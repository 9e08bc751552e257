"""The rules of the check `ranks_per_host`, on made-up clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster
from tests.support.findings import everywhere

CHECK = CHECKS["ranks_per_host"]
THREE = ("nd0", "nd1", "nd2")
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


@pytest.mark.parametrize(("hosts", "nproc"), [(("nd0",), 1), (("nd0",), 8), (THREE, 4)])
def test_even_hosts(hosts: Sequence[str], nproc: int) -> None:
    assert judge(make_cluster(hosts, nproc)) == []


def test_observe_says_what_was_told() -> None:
    derived = {"local_world_size": "derived from WORLD_SIZE"}
    assert CHECK.observe(Context(Launch(local_world_size=2), {})) == {"local_world_size": 2}
    silent = Launch(local_world_size=2, sources=derived)
    assert CHECK.observe(Context(silent, {})) == {"local_world_size": None}


def uneven() -> Cluster:
    cluster = make_cluster(THREE)
    kept = tuple(rank for rank in cluster.ranks if rank.seat != 5)
    cluster = replace(cluster, ranks=kept, world_size=5)
    return everywhere(everywhere(cluster, range(5), world_size=5), [4], local_world_size=1)


def test_uneven_hosts_are_worth_knowing() -> None:
    finding = only(uneven(), "nproc-differs", hosts=["nd2"])
    assert finding.level is Severity.INFO
    assert finding.message == "ranks per host: 1, elsewhere 2"


def test_numbers_that_do_not_add_up() -> None:
    cluster = everywhere(make_cluster(THREE), [2, 3], local_world_size=1)
    finding = only(cluster, "nproc-differs", hosts=["nd1"])
    assert finding.level is Severity.FAIL
    assert finding.message == "LOCAL_WORLD_SIZE adds up to 5, WORLD_SIZE is 6"
    assert finding.kind.title.startswith("LOCAL_WORLD_SIZE is not")


def test_not_told() -> None:
    cluster = everywhere(make_cluster(THREE), [2, 3], local_world_size=None)
    assert judge(cluster) == []


def test_an_absent_rank_is_not_a_wrong_number() -> None:
    cluster = change_rank(make_cluster(), 3, reported=False, launch=None)
    assert judge(cluster) == []


def test_own_view_compares_nobody() -> None:
    cluster = everywhere(make_cluster(("nd0",), complete=False), [0, 1], local_world_size=4)
    assert judge(cluster) == []
