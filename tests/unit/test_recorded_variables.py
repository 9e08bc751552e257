"""Which variables of the environment may be recorded."""

from __future__ import annotations

import pytest

from nccl_doctor.system.masking import MASK
from nccl_doctor.toolkit.variables.recorded import FAMILIES, NAMES, SET, allowed
from nccl_doctor.toolkit.variables.table import table
from tests.support.rows import each_row
from tests.support.secrets_planted import HIDDEN, SECRET_TEXTS


@each_row(
    "name",
    [
        "NCCL_DEBUG",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "GLOO_SOCKET_IFNAME",
        "CUDA_VISIBLE_DEVICES",
        "UCX_TLS",
        "FI_PROVIDER",
        "OMPI_COMM_WORLD_RANK",
        "SLURM_PROCID",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "PET_NNODES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_RANK",
        "LD_LIBRARY_PATH",
    ],
)
def test_allowed(name):
    assert allowed({name: "v"}) == {name: "v"}


@each_row(
    "name",
    [
        "HOME",
        "USER",
        "PATH",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "PYTHONPATH",
        "KUBECONFIG",
        "SLURM_JOB_USER",
        "SLURM_JOB_ACCOUNT",
        "SLURM_JOB_COMMENT",
        "SLURM_JOB_UID",
        "SLURM_JOB_GID",
        "SLURM_JOB_GROUP",
        "SLURM_JWT",
        "SLURM_EXPORT_ENV",
        "SLURM_SPANK_PYXIS_TOKEN",
        "SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image",
        "SPANK_X",
        "SLURM_SECRET",
        "OMPI_ARGV",
        "OMPI_COMMAND",
        "OMPI_MCA_mca_base_env_list",
        "OMPI_MCA_mca_base_env_list_internal",
        "OMPI_MCA_orte_precondition_transports",
        "OMPI_MCA_plm_rsh_args",
        "PET_RDZV_PASSWORD",
        "TORCH_API_KEY",
        "CUDA_X",
        "FI_X",
        "MY_NCCL_DEBUG",
        "nccl_debug",
        "NCCL_",
        "RANKING",
        "LD_PRELOAD",
    ],
)
def test_left_out(name):
    assert allowed({name: "v"}) == {}


@pytest.mark.parametrize(
    "name", ["NCCL_AUTH_TOKEN", "UCX_passphrase", "NCCL_PSK", "NCCL_PW", "UCX_PW", "TORCH_NCCL_X"]
)
def test_of_a_name_that_no_table_knows_only_that_it_is_set(name):
    assert allowed({name: "hunter2"}) == {name: SET}
    assert allowed({name: ""}) == {name: SET}


def test_a_secret_among_the_variables_of_a_plug_in_is_masked():
    assert allowed({"NCCL_OFI_TOKEN": "hunter2"}) == {"NCCL_OFI_TOKEN": MASK}


def test_credentials_inside_an_address_are_masked():
    env = {"PET_RDZV_ENDPOINT": "etcd://bob:hunter2@head:2379", "MASTER_ADDR": "bob:hunter2@head"}
    assert allowed(env) == {"PET_RDZV_ENDPOINT": "etcd://***@head:2379", "MASTER_ADDR": "***@head"}


def test_no_variable_carries_a_secret_into_a_report():
    for name in (*NAMES, *(f"{prefix}X" for prefix in FAMILIES)):
        for text in SECRET_TEXTS:
            held = allowed({name: f"a {text}"})[name]
            assert [each for each in HIDDEN if each in held] == [], (name, text)


def test_every_family_says_why_and_every_variable_of_the_table_with_a_known_prefix_is_recorded():
    assert all(FAMILIES.values())
    libraries = ("NCCL_", "GLOO_", "TORCH_", "UCX_", "FI_", "CUDA_")
    names = [name for name in table().variables if name.startswith(libraries)]
    assert set(allowed(dict.fromkeys(names, "1"))) == set(names)


def test_sorted():
    assert list(allowed({"RANK": "0", "NCCL_DEBUG": "INFO"})) == ["NCCL_DEBUG", "RANK"]
