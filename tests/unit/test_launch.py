"""`detect` on the environments that real launchers make."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.launchers import LAUNCHERS, TORCH
from nccl_doctor.launch.ranks import host_flags
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.layout import Claim, agree, lay_out
from nccl_doctor.model.options import Flags
from tests.support.command_lines import job
from tests.support.launches import (
    BATCH,
    DEEPSPEED,
    FLUX,
    HOROVOD,
    HYDRA,
    JSRUN,
    KUBEFLOW_1,
    KUBEFLOW_2,
    MASTER,
    MVAPICH,
    ONE_HOST_MPI,
    ONE_PER_NODE,
    OPEN_MPI,
    PALS,
    PLAIN,
    PRTERUN,
    RAY,
    SRUN,
    SUBMITIT,
    TORCHRUN,
    codes,
    problem,
    without,
)
from tests.support.rows import each_row

JSRUN_OF_ONE = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}


def of_pod(**changes: str) -> Flags | None:
    environ = {**KUBEFLOW_2, **changes}
    return host_flags(detect(environ), environ)


class TestHealthyLaunchers:
    """Rank 5 of 2 hosts x 4, told by each launcher in its own words."""

    @pytest.mark.parametrize(
        ("name", "environ"),
        [
            ("torchrun", TORCHRUN),
            ("accelerate", {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}),
            ("deepspeed", DEEPSPEED),
            ("srun", {**SRUN, **MASTER}),
            ("mpirun", {**OPEN_MPI, **MASTER}),
            ("mpi", {**HYDRA, **MASTER}),
            ("jsrun", {**JSRUN, **MASTER}),
            ("pals", {**PALS, **MASTER}),
            ("horovod", {**HOROVOD, **MASTER}),
            ("mpi", {**MVAPICH, **MASTER}),
            ("ray", RAY),
            ("env", PLAIN),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_fields(self, name: str, environ: Mapping[str, str]) -> None:
        launch = detect(environ)
        assert launch.launcher == name
        assert launch.problems == ()
        assert (launch.rank, launch.world_size) == (5, 8)
        assert (launch.local_rank, launch.local_world_size) == (1, 4)
        assert launch.nnodes == 2
        dealt = name in ("mpi", "mpirun", "jsrun")  # it may have dealt them round-robin
        assert launch.node_rank == (None if dealt else 1)
        assert (launch.master_addr, launch.master_port) == ("nd0", 29500)
        assert launch.is_complete()
        assert not launch.per_host
        assert all(
            source in environ or source.startswith("derived from ")
            for source in launch.sources.values()
        )

    def test_torchrun_extras(self) -> None:
        launch = detect(TORCHRUN)
        assert (launch.run_id, launch.restart_count, launch.agent_store) == ("job7", 2, True)
        assert launch.sources["node_rank"] == "GROUP_RANK"

    def test_accelerate_restarts_its_ranks_by_torchrun_s_agents(self) -> None:
        """The same record but for the name, so that the ranks meet again in the agent's store."""
        again = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}
        assert detect(again) == replace(detect(TORCHRUN), launcher="accelerate")
        assert detect(again).restart_count == 2

    @pytest.mark.parametrize("value", ["False", "true", "1", ""])
    def test_agent_store_is_compared_as_torch_does(self, value: str) -> None:
        assert not detect({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": value}).agent_store

    def test_ray_train_serves_the_store_itself(self) -> None:
        assert detect(RAY).agent_store
        assert not detect(without(RAY, "RAY_JOB_ID")).agent_store
        (said,) = detect(without(RAY, "MASTER_ADDR", "MASTER_PORT")).problems
        assert said.code == "launch-missing-variable"
        assert said.fix == 'TorchConfig(init_method="env"), which is its default'

    def test_nothing_at_all(self) -> None:
        assert detect({}) == Launch()
        assert detect({"PATH": "/bin", **MASTER}) == Launch()

    def test_uneven_hosts_are_legal(self) -> None:
        environ = {**TORCHRUN, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "RANK": "5"}
        assert detect(environ).problems == ()

    def test_one_host(self) -> None:
        launch = detect({**MASTER, "RANK": "0", "WORLD_SIZE": "1"})
        assert (launch.local_rank, launch.local_world_size) == (0, 1)
        assert (launch.node_rank, launch.nnodes) == (0, 1)
        assert launch.given("local_rank") is None
        assert launch.given("rank") == 0


class TestDerived:
    def test_says_so(self) -> None:
        launch = detect(PLAIN)
        assert launch.sources["node_rank"] == "derived from RANK and LOCAL_WORLD_SIZE"
        assert launch.sources["nnodes"] == "derived from WORLD_SIZE and LOCAL_WORLD_SIZE"
        assert launch.given("nnodes") is None

    def test_not_where_hosts_are_uneven(self) -> None:
        launch = detect({**PLAIN, "LOCAL_WORLD_SIZE": "3"})
        assert (launch.node_rank, launch.nnodes) == (None, None)
        assert launch.problems == ()

    def test_not_where_the_local_rank_contradicts(self) -> None:
        assert detect({**PLAIN, "LOCAL_RANK": "2"}).node_rank is None

    def test_a_bad_value_is_not_papered_over(self) -> None:
        launch = detect({**PLAIN, "NNODES": "two"})
        assert launch.nnodes is None
        assert codes(launch) == ["launch-bad-value"]

    @pytest.mark.parametrize(
        ("per_node", "node", "expected"),
        [("4(x2)", "1", 4), ("8(x1),2", "1", 2), ("1,7", "1", 7), ("4(x1)", "1", None)],
    )
    def test_slurm_tasks_per_node(self, per_node: str, node: str, expected: int | None) -> None:
        environ = {**SRUN, **MASTER, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}
        assert detect(environ).local_world_size == expected


class TestWhereRanksMeet:
    """srun and mpirun say no MASTER_ADDR: what all tasks are told alike has to do."""

    def test_srun(self) -> None:
        launch = detect(SRUN)
        assert launch.problems == ()
        assert (launch.master_addr, launch.master_port) == ("nd0", 19711)
        assert launch.is_complete()
        assert launch.sources["master_addr"] == "derived from SLURM_JOB_NODELIST"
        assert launch.sources["master_port"] == "derived from SLURM_JOB_ID"

    def test_a_step_on_other_hosts_of_the_job(self) -> None:
        assert detect({**SRUN, "SLURM_STEP_NODELIST": "nd[4-5]"}).master_addr == "nd4"

    def test_a_step_of_a_heterogeneous_job(self) -> None:
        """`srun --het-group=0,1`: Slurm counts through all components, and lists all hosts, in the
        variables of the step (env_array_for_step in src/common/env.c).
        """
        environ = {
            **SRUN,
            "SLURM_HET_SIZE": "2",
            "SLURM_NODEID": "2",
            "SLURM_PROCID": "6",
            "SLURM_STEP_NODELIST": "cpu7,gpu[1-2]",
            "SLURM_STEP_NUM_NODES": "3",
            "SLURM_STEP_NUM_TASKS": "9",
            "SLURM_STEP_TASKS_PER_NODE": "1,4(x2)",
        }
        launch = detect(environ)
        assert launch.problems == ()
        assert (launch.rank, launch.world_size) == (6, 9)
        assert (launch.local_rank, launch.local_world_size) == (1, 4)
        assert (launch.node_rank, launch.nnodes, launch.master_addr) == (2, 3, "cpu7")
        first = detect({**environ, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
        assert (first.local_world_size, first.master_addr) == (1, "cpu7")
        assert first.master_port == launch.master_port

    def test_a_job_that_slurm_requeued_is_a_new_run(self) -> None:
        """All of its ranks are new, and have counted the same: there is nothing to tell apart."""
        first, again = (detect({**SRUN, "SLURM_RESTART_COUNT": count}) for count in ("0", "2"))
        assert replace(again, restart_count=0) == first
        assert (again.agent_store, again.problems) == (False, ())

    def test_what_is_exported_is_stronger(self) -> None:
        launch = detect({**SRUN, "MASTER_ADDR": "ib0.nd0"})
        assert (launch.master_addr, launch.master_port) == ("ib0.nd0", 19711)
        launch = detect({**SRUN, "MASTER_PORT": "1234"})
        assert (launch.master_addr, launch.master_port) == ("nd0", 1234)

    def test_a_bad_value_is_not_replaced(self) -> None:
        launch = detect({**SRUN, "MASTER_ADDR": "", "MASTER_PORT": "x"})
        assert (launch.master_addr, launch.master_port) == (None, None)
        assert codes(launch) == ["launch-bad-value"] * 2

    @pytest.mark.parametrize(
        ("job", "port"), [("7", 15007), ("4294967295", 22295), ("1_12", 15112), ("x", None)]
    )
    def test_ports(self, job: str, port: int | None) -> None:
        assert detect({**SRUN, "SLURM_JOB_ID": job}).master_port == port

    def test_mpirun_on_one_host(self) -> None:
        launch = detect(ONE_HOST_MPI)
        assert launch.problems == ()
        assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 20105)
        assert launch.sources["master_addr"] == "derived from OMPI_COMM_WORLD_LOCAL_SIZE"

    @pytest.mark.parametrize(
        ("more", "address"),
        [
            ({"OMPI_MCA_orte_hnp_uri": "20719.0;tcp://10.0.0.1,172.17.0.1:4123"}, "10.0.0.1"),
            ({"OMPI_MCA_orte_hnp_uri": "20719.0;tcp://10.0.0.1:4123;ud://5"}, "10.0.0.1"),
            ({"OMPI_MCA_orte_hnp_uri": "nothing"}, None),
            ({"SLURM_JOB_NODELIST": "nd[3-4]"}, "nd3"),
            ({}, None),
            ({"PMIX_NAMESPACE": "prterun-gpu-7.site-417@1"}, "gpu-7.site"),  # Open MPI 5.0.11
            ({"PMIX_NAMESPACE": "nd0-4171"}, None),
        ],
    )
    def test_mpirun_on_several(self, more: Mapping[str, str], address: str | None) -> None:
        launch = detect({**OPEN_MPI, "PMIX_NAMESPACE": "4171", **more})
        assert launch.master_addr == address
        assert launch.master_port == (19171 if address else None)
        assert codes(launch) == ([] if address else ["launch-missing-variable"])

    def test_mpich_on_one_host(self) -> None:
        """MPICH 5.0.2 says no number of the job: the port is torch's default."""
        one = {**HYDRA, "PMI_RANK": "1", "PMI_SIZE": "4"}
        launch = detect(one)
        assert launch.problems == ()
        assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 29500)
        assert launch.sources["master_addr"] == "derived from MPI_LOCALNRANKS"
        assert launch.given("master_addr") is launch.given("master_port") is None
        assert detect({**one, "SLURM_JOB_ID": "4711"}).master_port == 19711
        assert codes(detect(HYDRA)) == ["launch-missing-variable"]  # eight ranks, four of them here

    def test_other_tasks_on_one_host(self) -> None:
        """Every launcher that says so has one host: 127.0.0.1, and a port of the job's number."""
        for environ, port, by in (
            ({**FLUX, "FLUX_JOB_NNODES": "1"}, 15002, "FLUX_JOB_NNODES"),
            ({**PALS, "PALS_RANKID": "1", "PMI_SIZE": "4"}, 22110, "PALS_LOCAL_SIZE"),
            ({**JSRUN, **JSRUN_OF_ONE}, 29500, "JSM_NAMESPACE_LOCAL_SIZE"),
            (SUBMITIT, 19711, "SUBMITIT_LOCAL_JOB_NUM_NODES"),
        ):  # fmt: skip
            launch = detect(environ)
            assert launch.problems == ()
            assert (launch.master_addr, launch.master_port) == ("127.0.0.1", port)
            assert launch.sources["master_addr"] == f"derived from {by}"

    def test_the_first_host_of_pbs(self, tmp_path: Path) -> None:
        (tmp_path / "nodes").write_text("x1c0\nx1c1\n")
        launch = detect({**PALS, "PBS_NODEFILE": str(tmp_path / "nodes")})
        assert launch.problems == ()
        assert (launch.master_addr, launch.master_port) == ("x1c0", 22110)
        assert (launch.node_rank, launch.nnodes) == (1, 2)
        assert launch.sources["master_addr"] == "derived from PBS_NODEFILE"

    @pytest.mark.parametrize(
        ("environ", "line"),
        [
            (FLUX, "MASTER_ADDR=$(flux run -n 1 hostname) MASTER_PORT=29500` (before the launch)"),
            (JSRUN, "MASTER_ADDR=$(jsrun -n 1 hostname) MASTER_PORT=29500` (before the launch)"),
            (PALS, 'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE") MASTER_PORT=29500` (before the la'),
            (HOROVOD, "MASTER_ADDR=ADDRESS MASTER_PORT=29500` (ADDRESS is that of rank 0's host)"),
        ],
    )
    def test_the_fix_names_the_launcher_that_is_there(
        self, environ: Mapping[str, str], line: str
    ) -> None:
        found = problem(environ, "launch-missing-variable")
        assert line in found.fix

    def test_prrte_says_no_number_of_ranks(self) -> None:
        """One run of all tasks, and not one for each that then blames the others for a CPU."""
        launch = detect(PRTERUN)
        assert (launch.launcher, launch.rank, launch.master_addr) == ("prterun", 5, "nd0")
        assert codes(launch) == ["launch-missing-variable"]
        assert launch.problems[0].message == "WORLD_SIZE is not set"
        whole = detect({**PRTERUN, "WORLD_SIZE": "8"})
        assert whole.problems == ()
        assert (whole.world_size, whole.master_port) == (8, 22111)

    def test_a_task_of_prrte_is_known_by_its_namespace(self) -> None:
        """`prun` in the machine of another `prte`, or a container without PRTE_LAUNCHED."""
        alone = without(PRTERUN, "PRTE_LAUNCHED")
        for namespace in ("prterun-nd0-4711@1", "prte-nd0-4711@2"):
            found = detect({**alone, "PMIX_NAMESPACE": namespace})
            assert (found.launcher, found.rank, found.master_addr) == ("prterun", 5, "nd0")
        assert detect({**alone, "PMIX_NAMESPACE": "slurm.pmix.4711.0"}) == Launch()
        one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        assert detect({**PRTERUN, **one}) == Launch(), "the only task of Open MPI 5"

    @each_row(
        ("leader", "line"),
        [
            ("LWS_LEADER_ADDRESS", "`export MASTER_ADDR=$LWS_LEADER_ADDRESS`"),
            ("DSTACK_MASTER_NODE_IP", "`export MASTER_ADDR=$DSTACK_MASTER_NODE_IP`"),
            ("X", "`# export MASTER_ADDR=ADDRESS` (ADDRESS is that of rank 0's host)"),
        ],
    )
    def test_ranks_of_a_scheduler_that_tells_its_first_host(self, leader: str, line: str) -> None:
        found = problem({**without(PLAIN, "MASTER_ADDR"), leader: "l-0"}, "launch-missing-variable")
        assert found.fix == line

    def test_the_master_node_of_azure(self) -> None:
        launch = detect({**OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"})
        assert launch.master_addr == "10.0.0.4"

    def test_the_port_of_submitit(self) -> None:
        """As submitit 1.5.4 makes it of a job number, on all ranks alike."""
        job = {**SRUN, "SUBMITIT_EXECUTOR": "slurm"}
        launch = detect(job)
        seeded = random.Random("4711").randint(20000, 60000)
        assert (launch.master_addr, launch.master_port) == ("nd0", seeded)
        assert launch.sources["master_port"] == "derived from submitit's rule"
        part = {**job, "SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}
        assert detect(part).master_port == random.Random("4700_3").randint(20000, 60000)
        assert detect({**job, "MASTER_PORT": "1234"}).master_port == 1234

    def test_a_torchrun_in_a_step_is_not_helped(self) -> None:
        launch = detect({**without(TORCHRUN, "MASTER_ADDR"), **ONE_PER_NODE})
        assert launch.master_addr is None
        assert codes(launch) == ["launch-missing-variable"]


class TestPerHostLaunchers:
    def test_kubeflow_1_counts_pods(self) -> None:
        launch = detect(KUBEFLOW_1)
        assert launch.launcher == "kubeflow"
        assert launch.per_host
        assert (launch.rank, launch.world_size) == (None, None)
        assert (launch.node_rank, launch.nnodes) == (1, 2)
        assert (launch.master_addr, launch.master_port) == ("nd0", 29500)
        assert launch.problems == ()
        assert not launch.is_complete()

    @pytest.mark.parametrize(
        ("name", "more", "nproc"),
        [
            ("pai", {"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "4"}, "4"),
            ("vertex", {"RANK": "1", "WORLD_SIZE": "2", "CLUSTER_SPEC": "{}"}, None),
            (
                "mosaicml",
                {"NODE_RANK": "1", "NUM_NODES": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
                "4",
            ),
        ],
    )
    def test_clouds_that_count_hosts(
        self, name: str, more: Mapping[str, str], nproc: str | None
    ) -> None:
        environ = {**MASTER, **more}
        launch = detect(environ)
        assert (launch.launcher, launch.problems, launch.rank) == (name, (), None)
        flags = host_flags(launch, environ)
        assert flags is not None
        assert (flags.nnodes, flags.node_rank, flags.nproc_per_node) == (2, 1, nproc)
        assert (flags.master_addr, flags.master_port) == ("nd0", 29500)

    def test_a_host_whose_program_starts_the_ranks(self) -> None:
        """Lightning's variables, of its page on general purpose clusters: a host, and no rank."""
        host = {**MASTER, "NODE_RANK": "1", "WORLD_SIZE": "8"}
        assert detect(host) == Launch()
        assert detect({**MASTER, "WORLD_SIZE": "8"}).launcher == "env"

    def test_ranks_that_are_numbered_on_their_host(self) -> None:
        """Lightning, where the processes are started by hand: RANK follows, as it numbers them."""
        rank = {**MASTER, "NODE_RANK": "1", "LOCAL_RANK": "2", "WORLD_SIZE": "8"}
        for more in ({"NNODES": "2"}, {"NUM_NODES": "2"}, {"LOCAL_WORLD_SIZE": "4"}):
            launch = detect({**rank, **more})
            assert (launch.launcher, launch.problems) == ("env", ())
            assert (launch.rank, launch.local_world_size) == (6, 4)
            assert (launch.node_rank, launch.nnodes) == (1, 2)
            assert launch.sources["rank"] == "derived from NODE_RANK and LOCAL_RANK"
        wrong = {**rank, "NODE_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
        for known in (rank, wrong):
            assert problem(known, "launch-missing-variable").message == "RANK is not set"
        found = problem(rank, "launch-missing-variable")
        assert "`# export RANK=$((NODE_RANK * NUMBER + LOCAL_RANK))`" in found.fix

    def test_ranks_inside_such_a_host_are_ranks(self) -> None:
        ranks = {**PLAIN, "NPROC_PER_NODE": "4", "CLUSTER_SPEC": "{}"}
        assert detect(ranks).launcher == "env"

    def test_kubeflow_2(self) -> None:
        launch = detect(KUBEFLOW_2)
        assert launch.launcher == "kubeflow"
        assert (launch.node_rank, launch.nnodes) == (1, 2)
        assert launch.local_world_size is None  # `gpu` is for whoever starts the ranks
        assert launch.master_addr == "job-node-0-0.job"
        assert launch.problems == ()

    def test_elastic_range_is_not_a_bad_number(self) -> None:
        environ = {**without(KUBEFLOW_2, "PET_MASTER_ADDR", "PET_MASTER_PORT"), "PET_NNODES": "1:4"}
        assert detect({**environ, "PET_RDZV_ENDPOINT": "nd0:29500"}).problems == ()

    def test_torchrun_inside_a_pod_is_torchrun(self) -> None:
        launch = detect({**KUBEFLOW_2, **TORCHRUN})
        assert (launch.launcher, launch.rank, launch.problems) == ("torchrun", 5, ())

    @each_row(
        ("environ", "launcher"),
        [
            ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"),
            (DEEPSPEED, "deepspeed"),
            ({**SRUN, **MASTER}, "srun"),  # Slurm's daemons as pods (Slinky, Soperator)
            ({**OPEN_MPI, **MASTER}, "mpirun"),  # MPIJob
            (RAY, "ray"),  # KubeRay
        ],
    )
    def test_any_launcher_inside_a_pod_is_itself(
        self, environ: Mapping[str, str], launcher: str
    ) -> None:
        launch = detect({**KUBEFLOW_2, **environ})
        assert (launch.launcher, launch.per_host, launch.problems) == (launcher, False, ())
        assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
        assert (launch.master_addr, launch.master_port) == ("nd0", 29500)

    def test_pods_of_one_job_may_differ_in_their_ranks(self) -> None:
        """Those of the Master and of the Worker have templates of their own."""
        pods = [
            of_pod(PET_NODE_RANK=str(node), PET_NPROC_PER_NODE=n) for node, n in enumerate("28")
        ]
        lines = [
            job(f"torchrun --nnodes=2 --node_rank={node} --master_addr=a --nproc_per_node={n} t.py")
            for node, n in enumerate("28")
        ]
        for told in (pods, lines):
            claims = [
                Claim(seat, each.node_rank, each.nnodes or 0, int(each.nproc_per_node or 0))
                for seat, each in enumerate(each for each in told if each)
            ]
            assert agree(claims, 2)
            assert [place.nproc for place in lay_out(claims, 2).nodes] == [2, 8]

    def test_ranks_inside_a_pod_are_ranks(self) -> None:
        launch = detect({**PLAIN, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert (launch.launcher, launch.rank) == ("env", 5)

    def test_node_rank_out_of_range(self) -> None:
        found = problem({**KUBEFLOW_2, "PET_NODE_RANK": "2"}, "launch-bad-value")
        assert found.fatal
        assert found.message == "PET_NODE_RANK=2 with PET_NNODES=2"

    def test_missing_master(self) -> None:
        found = problem(without(KUBEFLOW_2, "PET_MASTER_ADDR"), "launch-missing-variable")
        assert found.variables == {"PET_MASTER_ADDR": None}


class TestNoFalseBlame:
    """Everything here is legal, and looks like a contradiction."""

    @each_row(
        ("environ", "launcher"),
        [
            ({**TORCHRUN, **ONE_PER_NODE}, "torchrun"),  # srun starts one torchrun per host
            ({**TORCHRUN, **BATCH}, "torchrun"),  # torchrun in a batch script
            ({**TORCHRUN, **ONE_PER_NODE, "SLURM_NTASKS_PER_NODE": "4"}, "torchrun"),  # inherited
            ({**DEEPSPEED, **ONE_PER_NODE}, "deepspeed"),
            # several torchruns per host, each counted as a node
            ({**TORCHRUN, **SRUN, "WORLD_SIZE": "32", "GROUP_WORLD_SIZE": "8"}, "torchrun"),
            ({**TORCHRUN, "NODE_RANK": "7", "NNODES": "9"}, "torchrun"),  # the user's own names
            ({**TORCHRUN, "PET_NNODES": "5"}, "torchrun"),  # the command line won
            (BATCH, "none"),
            (without(BATCH, "SLURM_PROCID"), "none"),  # salloc shell
            ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, "none"),  # srun --pty bash
            ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "none"),
            ({"PMIX_RANK": "0"}, "none"),
            # mpirun and hydra start their daemons with srun, one per host
            ({**OPEN_MPI, **MASTER, **ONE_PER_NODE}, "mpirun"),
            ({**HYDRA, **MASTER, **ONE_PER_NODE, "PMIX_RANK": "1"}, "mpi"),
            ({**SRUN, **MASTER, "PMI_RANK": "5", "PMIX_RANK": "5", "PMI_SIZE": "8"}, "srun"),
            # a script per host that numbers its own ranks
            ({**PLAIN, **ONE_PER_NODE}, "env"),
            # every task sees one GPU, as number 0
            ({**SRUN, **MASTER, "LOCAL_RANK": "0"}, "srun"),
            ({**SRUN, **MASTER, "SLURM_NTASKS": "16"}, "srun"),  # the batch job's
            ({**SRUN, **MASTER, "RANK": "5", "WORLD_SIZE": "8"}, "srun"),
        ],
    )
    def test_legal(self, environ: Mapping[str, str], launcher: str) -> None:
        launch = detect(environ)
        assert launch.launcher == launcher
        assert launch.problems == ()

    def test_open_mpi_node_rank_is_not_a_node(self) -> None:
        launch = detect({**OPEN_MPI, **MASTER, "OMPI_COMM_WORLD_NODE_RANK": "3"})
        assert launch.node_rank is None


NAMES = sorted(
    {
        variable
        for table in (TORCH, *(row.own for row in LAUNCHERS))
        for variables in table.values()
        for variable in variables
    }
    | {name for row in LAUNCHERS for mark in row.marks for name in mark}
    | {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "PET_RDZV_ENDPOINT"}
    | {"SLURM_JOB_NODELIST", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"}
)
VALUES = st.one_of(
    st.integers(-2, 20).map(str), st.text(max_size=12), st.sampled_from(["", " 3", "4(x2)", "1:4"])
)


@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=8)), VALUES))
def test_detect_never_raises_and_survives_json(environ: dict[str, str]) -> None:
    launch = detect(environ)
    assert decode(Launch, Node("launch", json.loads(json.dumps(encode(launch))))) == launch
    if launch.launcher == "none":
        assert launch == Launch()
    for item in launch.problems:
        assert item.message
        assert item.fix
        assert "\n" not in item.message
    for name in launch.sources:
        assert getattr(launch, name) is not None


@each_row("row", LAUNCHERS)
def test_tables_name_real_fields(row: object) -> None:
    assert set(row.own) <= set(Launch.__dataclass_fields__)  # type: ignore[attr-defined]
