"""The rules of the check `host_identity`, on made-up clusters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster

CHECK = CHECKS["host_identity"]
THREE = ("nd0", "nd1", "nd2")
FACTS = {"machine_id": None, "boot_id": "b", "netns": 1, "image": False}
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


def test_observe() -> None:
    facts = CHECK.observe(Context(launch=Launch(), env={}))
    assert set(facts) == set(FACTS)
    json.dumps(facts)
    assert CHECK.observe(Context(launch=Launch(), env={"KUBERNETES_SERVICE_HOST": ""}))["image"]


class TestMachines:
    def cluster(self, *facts: Mapping[str, Any], names: Sequence[str] = THREE) -> Cluster:
        by_rank = {number: {**FACTS, **fact} for number, fact in enumerate(facts)}
        return make_cluster(names, nproc=1, check=CHECK.name, by_rank=by_rank)

    def test_namespaces_of_one_kernel_are_hosts_of_their_own(self) -> None:
        """As in the lab, where hosts share machine id and boot id."""
        same = {"machine_id": "m"}
        assert judge(self.cluster(*({**same, "netns": n} for n in range(3)))) == []

    def test_one_name_for_two_hosts(self) -> None:
        names = ("nd0", "node", "node")
        cluster = self.cluster(*({"boot_id": f"b{n}"} for n in range(3)), names=names)
        finding = only(cluster, "hostname-duplicate", hosts=["node"])
        assert finding.level is Severity.WARN
        assert finding.message == "2 hosts have the name node"

    def test_a_clone_that_took_itself_for_the_master_never_came_in(self) -> None:
        cluster = self.cluster({"boot_id": "b0"}, {"boot_id": "b1"}, names=("nd0", "nd0"))
        hosts = (cluster.hosts[0], replace(cluster.hosts[1], joined=False))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
        kept_out = replace(cluster, hosts=hosts, ranks=ranks)
        found = only(kept_out, "hostname-duplicate", hosts=["nd0"])
        assert found.level is Severity.FAIL

    def test_one_name_for_two_namespaces(self) -> None:
        cluster = self.cluster({"netns": 1}, {"netns": 2}, {"netns": 3}, names=("nd0", "a", "a"))
        only(cluster, "hostname-duplicate", hosts=["a"])

    def test_two_node_ranks_on_one_host_share_its_name_rightly(self) -> None:
        cluster = self.cluster({"netns": 1}, {"netns": 2}, {"netns": 2}, names=("nd0", "a", "a"))
        finding = only(cluster, "host-shared-by-nodes", hosts=["a"])
        assert finding.level is Severity.INFO
        assert finding.message == "node ranks 1–2 on one host"

    def test_names_alone_prove_nothing(self) -> None:
        assert judge(make_cluster(("nd0", "a", "a"))) == []

    @pytest.mark.parametrize(("image", "severity"), [(False, Severity.WARN), (True, Severity.INFO)])
    def test_cloned_machine_id(self, image: bool, severity: Severity) -> None:
        clones = [{"boot_id": f"b{n}", "machine_id": "m", "image": image} for n in (1, 2)]
        cluster = self.cluster({"boot_id": "b0", "machine_id": "other"}, *clones)
        finding = only(cluster, "machine-id-duplicate", hosts=["nd1", "nd2"])
        assert finding.level is severity
        assert ("reboot" in finding.kind.fix) is not image

    def test_no_machine_id_is_not_a_machine_id(self) -> None:
        assert judge(self.cluster(*({"boot_id": f"b{n}"} for n in range(3)))) == []

    def test_own_view_speaks_of_nobody_else(self) -> None:
        cluster = self.cluster({"netns": 1}, names=("a",))
        assert judge(replace(cluster, complete=False)) == []

    def test_own_views_of_hosts_that_never_met_are_compared(self) -> None:
        cluster = self.cluster({"netns": 1}, {"netns": 2}, {"netns": 3}, names=("nd0", "a", "a"))
        only(replace(cluster, complete=False), "hostname-duplicate", hosts=["a"])

    def test_what_could_not_be_read_proves_nothing(self) -> None:
        unread = {"boot_id": None, "netns": None}
        assert judge(self.cluster(unread, unread, unread)) == []
