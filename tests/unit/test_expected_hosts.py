"""What hosts are called that never came, as the scheduler tells."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.launch.ranks import names_of_nodes
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options

SLURM = {"SLURM_JOB_NODELIST": "gpu[07-09]"}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("environ", "here", "names"),
    [
        pytest.param(SLURM, [(0, "gpu07")], ["gpu07", "gpu08", "gpu09"], id="slurm"),
        pytest.param(
            SLURM, [(0, "GPU07.cluster.local")], ["gpu07", "gpu08", "gpu09"], id="full name"
        ),
        pytest.param(
            {"SLURM_STEP_NODELIST": "a[1-3]", "SLURM_JOB_NODELIST": "a[0-7]"},
            [(0, "a1"), (2, "a3")],
            ["a1", "a2", "a3"],
            id="a step on a part of the allocation",
        ),
        pytest.param(
            {"SLURM_STEP_NODELIST": "gpu07", **SLURM},
            [(0, "gpu07")],
            ["gpu07", "gpu08", "gpu09"],
            id="a step on each host",
        ),
        pytest.param(
            POD, [(0, "llm-master-0")], ["llm-master-0", "llm-worker-0", "llm-worker-1"],
            id="PyTorchJob",
        ),
        pytest.param(
            POD, [(0, "llm-worker-0")], ["llm-worker-0", "llm-worker-1", "llm-worker-2"],
            id="PyTorchJob without a master",
        ),
        pytest.param(
            POD, [(0, "llm-node-0-0")], ["llm-node-0-0", "llm-node-0-1", "llm-node-0-2"],
            id="Trainer",
        ),
    ],
)  # fmt: skip
def test_names(environ: Mapping[str, str], here: list[tuple[int, str]], names: list[str]) -> None:
    master = f"{here[0][1]}.llm.svc"
    assert list(names_of_nodes(environ, 3, master, here).values()) == names


@pytest.mark.parametrize(
    ("environ", "here"),
    [
        pytest.param({}, [(0, "llm-master-0")], id="no scheduler"),
        pytest.param({"SLURM_JOB_NODELIST": "gpu[07-08]"}, [(0, "gpu07")], id="another number"),
        pytest.param({"SLURM_JOB_NODELIST": "gpu[07-"}, [(0, "gpu07")], id="no list"),
        pytest.param(SLURM, [(0, "gpu08")], id="numbered otherwise"),
        pytest.param(SLURM, [(0, "gpu07"), (1, "gpu08"), (1, "gpu09")], id="two are node 1"),
        pytest.param(SLURM, [(0, "gpu07"), (None, "gpu09")], id="no node rank"),
        pytest.param(SLURM, [(0, "gpu07"), (7, "gpu09")], id="a node beyond"),
        pytest.param(POD, [(0, "trainer")], id="a pod without a number"),
        pytest.param(POD, [(1, "llm-worker-0")], id="node 0 is not known"),
    ],
)
def test_what_is_not_sure_is_not_said(
    environ: Mapping[str, str], here: list[tuple[int | None, str]]
) -> None:
    assert names_of_nodes(environ, 3, here[0][1], here) == {}


def test_pods_that_have_the_names_of_their_machines() -> None:
    assert names_of_nodes(POD, 3, "llm-master-0", [(0, "kind-worker-0")]) == {}


def test_an_absent_host_has_its_name() -> None:
    launch = Launch("srun", 0, 6, 0, 2, 0, 3, "gpu07", 29500)
    log = EvidenceLog(launch, {}, SLURM)
    log.sign_in(0, SignIn("t", 1, launch, "gpu07", "k"), 0.0)
    cluster = log.cluster(Options(), "gloo")
    assert [(h.name, h.node_rank, h.reported) for h in cluster.hosts] == [
        ("gpu07", 0, True),
        ("gpu08", 1, False),
        ("gpu09", 2, False),
    ]
    assert [(rank.rank, rank.host.name) for rank in cluster.absent] == [
        (1, "gpu07"), (2, "gpu08"), (3, "gpu08"), (4, "gpu09"), (5, "gpu09")
    ]  # fmt: skip
