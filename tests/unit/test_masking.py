"""Which variables may be recorded, and with what hidden."""

from __future__ import annotations

import json

import pytest

from nccl_doctor.toolkit.masking import allowed


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
        "MY_NCCL_DEBUG",
        "nccl_debug",
        "RANKING",
        "LD_PRELOAD",
    ],
)
def test_left_out(name):
    assert allowed({name: "v"}) == {}


@pytest.mark.parametrize(
    "name",
    ["NCCL_AUTH_TOKEN", "TORCH_API_KEY", "SLURM_SECRET", "PET_RDZV_PASSWORD", "UCX_passphrase"],
)
def test_secrets_are_masked(name):
    assert allowed({name: "hunter2"}) == {name: "***"}


def test_credentials_inside_an_address_are_masked():
    env = {"PET_RDZV_ENDPOINT": "etcd://bob:hunter2@head:2379", "NCCL_X": "a@b"}
    assert allowed(env) == {"PET_RDZV_ENDPOINT": "etcd://***@head:2379", "NCCL_X": "a@b"}


def test_bytes_that_are_no_text_survive_json_and_utf8():
    value = b"\xff\xfe".decode("utf-8", "surrogateescape")
    held = allowed({"NCCL_DEBUG_FILE": value})["NCCL_DEBUG_FILE"]
    assert json.loads(json.dumps(held).encode()) == held
    held.encode("utf-8")


def test_sorted():
    assert list(allowed({"RANK": "0", "NCCL_DEBUG": "INFO"})) == ["NCCL_DEBUG", "RANK"]
