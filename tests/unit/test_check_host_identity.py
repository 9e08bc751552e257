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
from tests.support.clusters import change_rank, make_cluster

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

    def shared(self, backend: str, *env: Mapping[str, str]) -> Cluster:
        """A host of its own, and one with two node ranks, whose tasks have these variables."""
        cluster = self.cluster({"netns": 1}, {"netns": 2}, {"netns": 2}, names=("nd0", "a", "a"))
        for seat, variables in enumerate(env, start=1):
            cluster = change_rank(cluster, seat, env=variables)
        return replace(cluster, backend=backend)

    @pytest.mark.parametrize(
        ("backend", "level"), [("gloo", Severity.WARN), ("nccl", Severity.FAIL)]
    )
    def test_a_launcher_in_each_task_of_srun(self, backend: str, level: Severity) -> None:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        tasks = [{**step, "SLURM_PROCID": number} for number in ("2", "3")]
        finding = only(self.shared(backend, *tasks), "host-shared-by-nodes", hosts=["a"])
        assert finding.level is level
        assert finding.message.endswith("on one host: one for each of 2 tasks that srun started")
        assert [each.command for each in finding.fix.steps] == [
            "# srun --ntasks-per-node=1",
            "# --node-rank $SLURM_NODEID",
        ]

    def test_a_launcher_in_each_task_of_mpirun(self) -> None:
        tasks = [{"OMPI_COMM_WORLD_RANK": n, "OMPI_COMM_WORLD_SIZE": "4"} for n in ("2", "3")]
        finding = only(self.shared("gloo", *tasks), "host-shared-by-nodes", hosts=["a"])
        assert finding.level is Severity.WARN
        assert finding.fix.steps[0].command == "# mpirun --map-by ppr:1:node"

    @pytest.mark.parametrize(
        "more",
        [
            [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
            [{"SLURM_PROCID": "2"}, {"SLURM_PROCID": "2"}],
            [{"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}],
        ],
        ids=["GPUs of their own", "one task", "two steps"],
    )
    def test_what_is_no_launcher_in_each_task(self, more: Sequence[Mapping[str, str]]) -> None:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        tasks = [{**step, "SLURM_PROCID": n, **own} for n, own in zip("23", more, strict=True)]
        finding = only(self.shared("nccl", *tasks), "host-shared-by-nodes", hosts=["a"])
        assert finding.level is Severity.INFO

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
