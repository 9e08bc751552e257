"""What `detect` finds wrong with an environment: what contradicts, misses or is no value."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccl_doctor.launch.detect import detect
from nccl_doctor.toolkit.slurm import first_address
from tests.support.launches import (
    BATCH,
    FLUX,
    JSRUN,
    MASTER,
    ONE_PER_NODE,
    OPEN_MPI,
    PLAIN,
    SRUN,
    STANDALONE,
    TORCHRUN,
    codes,
    problem,
    without,
)
from tests.support.rows import each_row


class TestDisagreement:
    def test_rank_against_slurm(self) -> None:
        launch = detect({**SRUN, **MASTER, "RANK": "0", "WORLD_SIZE": "8"})
        assert (launch.launcher, launch.rank) == ("srun", 0)  # torch reads RANK
        (found,) = launch.problems
        assert found.code == "launch-sources-disagree"
        assert found.message == "RANK=0 but SLURM_PROCID=5"
        assert not found.fatal
        assert "export RANK=$SLURM_PROCID" in found.fix

    def test_rank_against_open_mpi(self) -> None:
        found = problem({**OPEN_MPI, **PLAIN, "RANK": "3"}, "launch-sources-disagree")
        assert found.variables == {"RANK": "3", "OMPI_COMM_WORLD_RANK": "5"}

    def test_slurm_against_pmix(self) -> None:
        found = problem({**SRUN, **MASTER, "PMIX_RANK": "2"}, "launch-sources-disagree")
        assert found.variables == {"SLURM_PROCID": "5", "PMIX_RANK": "2"}

    @pytest.mark.parametrize("world", ["4", "16"])
    def test_world_size_against_slurm(self, world: str) -> None:
        environ = {**SRUN, **MASTER, "WORLD_SIZE": world, "SLURM_PROCID": "3"}
        launch = detect(environ)
        assert launch.world_size == int(world)
        disagreement = launch.problems[0]
        assert disagreement.message == f"WORLD_SIZE={world} but SLURM_STEP_NUM_TASKS=8"
        assert disagreement.fatal

    @pytest.mark.parametrize(
        "outer",
        [SRUN, without({**SRUN, "SLURM_NTASKS_PER_NODE": "4"}, "SLURM_STEP_TASKS_PER_NODE")],
    )
    def test_a_torchrun_per_task(self, outer: Mapping[str, str]) -> None:
        found = problem({**TORCHRUN, **outer}, "launch-sources-disagree")
        assert "srun started 8 tasks, 4 on this host" in found.message
        assert "--ntasks-per-node=1" in found.fix
        assert found.fatal

    def test_a_torchrun_per_mpi_task(self) -> None:
        found = problem({**TORCHRUN, **OPEN_MPI}, "launch-sources-disagree")
        assert "mpirun started 8 tasks" in found.message

    @each_row(
        ("outer", "said"),
        [
            (SRUN, "srun started 8 tasks, 4 on this host, and each ran torchrun for one host"),
            (ONE_PER_NODE, "srun started 2 tasks, 1 on this host, and each ran"),
            (OPEN_MPI, "mpirun started 8 tasks, 4 on this host, and each ran"),
            (JSRUN, "jsrun started 8 tasks, 4 on this host, and each ran"),
            (FLUX, "flux started 8 tasks, and each ran torchrun for one host"),
        ],
    )
    def test_independent_runs_on_one_allocation(self, outer: Mapping[str, str], said: str) -> None:
        """`srun --ntasks-per-node=4 torchrun --standalone …`: nothing contradicts anything."""
        found = problem({**STANDALONE, **outer}, "launch-runs-independent")
        assert found.message.startswith(said)
        assert not found.fatal
        assert "once per host" in found.fix

    @each_row("outer", [BATCH, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, {}])
    def test_one_torchrun_is_no_set_of_runs(self, outer: Mapping[str, str]) -> None:
        assert detect({**STANDALONE, **outer}).problems == ()

    def test_world_smaller_than_its_hosts(self) -> None:
        environ = {**PLAIN, "RANK": "1", "WORLD_SIZE": "4", "NNODES": "2", "NODE_RANK": "0"}
        found = problem(environ, "launch-sources-disagree")
        assert found.message == "WORLD_SIZE=4 but NNODES=2 and LOCAL_WORLD_SIZE=4"

    def test_one_host_is_not_the_world(self) -> None:
        found = problem({**PLAIN, "NNODES": "1", "NODE_RANK": "0"}, "launch-sources-disagree")
        assert not found.fatal  # torch reads WORLD_SIZE only


class TestMissing:
    def test_all_in_one_problem(self) -> None:
        found = problem({"RANK": "1", "LOCAL_RANK": "1"}, "launch-missing-variable")
        assert found.message == "WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set"
        assert found.variables == {"WORLD_SIZE": None, "MASTER_ADDR": None, "MASTER_PORT": None}

    def test_srun_without_a_list_of_hosts(self) -> None:
        launch = detect(without(SRUN, "SLURM_JOB_NODELIST"))
        assert (launch.master_addr, launch.master_port) == (None, None)
        (found,) = launch.problems
        assert found.code == "launch-missing-variable"
        assert found.fix.startswith(f"`export MASTER_ADDR={first_address()} MASTER_PORT=29500`")

    def test_mpirun(self) -> None:
        found = problem(OPEN_MPI, "launch-missing-variable")
        assert found.fix == (
            "`export MASTER_ADDR=$(mpirun -n 1 hostname) MASTER_PORT=29500`; "
            "`# mpirun -x MASTER_ADDR -x MASTER_PORT`"
        )

    def test_only_what_is_missing(self) -> None:
        environ = without({**SRUN, "MASTER_ADDR": "nd0"}, "SLURM_JOB_ID")
        found = problem(environ, "launch-missing-variable")
        assert found.message == "MASTER_PORT is not set"
        assert "MASTER_ADDR" not in found.fix


class TestBadValues:
    @each_row(
        ("name", "value"),
        [
            ("RANK", ""),
            ("RANK", "one"),
            ("RANK", "-1"),
            ("RANK", "1.0"),
            ("RANK", "0x1"),
            ("RANK", "٣"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "9" * 5000),
            ("WORLD_SIZE", "4294967296"),
            ("LOCAL_RANK", "-1"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("MASTER_PORT", "tcp://10.0.0.1:29500"),
            ("MASTER_ADDR", ""),
            ("MASTER_ADDR", "  "),
            ("MASTER_ADDR", "nd0 nd1"),
            ("MASTER_ADDR", "nd0\n"),
        ],
    )
    def test_is_named_and_dropped(self, name: str, value: str) -> None:
        environ = {**TORCHRUN, name: value}
        found = problem(environ, "launch-bad-value")
        assert found.variables == {name: value}
        assert found.fatal
        assert found.fix
        assert len(found.message) < 200
        launch = detect(environ)
        assert getattr(launch, name.lower()) is None
        assert name.lower() not in launch.sources

    def test_a_world_that_no_cluster_has_is_a_mistake(self) -> None:
        found = problem({**TORCHRUN, "WORLD_SIZE": "2000000"}, "launch-bad-value")
        assert found.message == "WORLD_SIZE=2000000 is outside 1–131072"
        assert detect({**TORCHRUN, "WORLD_SIZE": "2000000"}).world_size is None

    def test_a_bad_rank_is_not_replaced_by_another_source(self) -> None:
        launch = detect({**SRUN, **MASTER, "RANK": "x"})
        assert launch.rank is None
        assert codes(launch) == ["launch-bad-value"]

    def test_white_space_around_a_number_is_tolerated_by_torch(self) -> None:
        launch = detect({**TORCHRUN, "RANK": " 5"})
        assert launch.rank == 5
        (found,) = launch.problems
        assert (found.code, found.fatal) == ("launch-bad-value", False)
        assert found.fix == "`export RANK=5`"

    def test_fix_names_the_range(self) -> None:
        port = problem({**TORCHRUN, "MASTER_PORT": "0"}, "launch-bad-value")
        assert port.fix == "set MASTER_PORT to a whole number from 1 to 65535"
        rank = problem({**TORCHRUN, "RANK": "-1"}, "launch-bad-value")
        assert rank.fix == "set RANK to a whole number of at least 0"

    def test_stripped_address_is_quoted(self) -> None:
        found = problem({**TORCHRUN, "MASTER_ADDR": "nd0; rm x "}, "launch-bad-value")
        assert found.fix == "`export MASTER_ADDR='nd0; rm x'`"

    def test_rank_out_of_range(self) -> None:
        found = problem({**TORCHRUN, "RANK": "8"}, "rank-out-of-range")
        assert found.message == "RANK=8 with WORLD_SIZE=8"

    def test_local_rank_out_of_range(self) -> None:
        found = problem({**TORCHRUN, "LOCAL_RANK": "4"}, "local-rank-out-of-range")
        assert found.variables == {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}
