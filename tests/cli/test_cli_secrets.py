"""Secrets planted in every variable that may be recorded, in files and in command lines: none of
them leaves the program, in any form, with pseudonyms or without.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest
from click.testing import CliRunner

from nccl_doctor.cli import cli
from nccl_doctor.report import issue
from nccl_doctor.report.formats import formats
from nccl_doctor.toolkit.variables.recorded import FAMILIES, NAMES
from tests.cli.program import error_of, program
from tests.support.secrets_planted import HIDDEN, SECRET_TEXTS

FORMS = [word for form in formats() for word in (f"--{form}", f"out.{form}")]
WHO_AM_I = ("RANK", "SIZE", "NODE", "LOCAL", "SLURM_", "OMPI_", "MASTER_", "PMI", "MPI_", "PET_")
"""In names of variables by which a launcher says who this process is."""
OTHERS = [
    *(name for name in NAMES if not any(word in name for word in WHO_AM_I)),
    *(f"{prefix}{word}" for prefix in FAMILIES for word in ("X", "AUTH_TOKEN")),
    *("NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE", "NCCL_NET_PLUGIN", "OFI_NCCL_TUNER_TYPE"),
    *("WANDB__SERVICE_WAIT", "https_proxy", "SLURM_JWT", "SLURM_EXPORT_ENV", "SLURM_SPANK_X"),
    *("OMPI_ARGV", "OMPI_MCA_mca_base_env_list", "HF_TOKEN", "SPANK_X"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "KUBERNETES_SERVICE_HOST"),
]
BEFORE_US = {"LD_LIBRARY_PATH", *(name for name in NAMES if name.startswith("TORCH_"))}
"""The loader, and torch at its import, read these first: they stop at a bad value, or print it."""
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LAUNCHER = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]


def planted(names: Sequence[str]) -> dict[str, str]:
    """Each variable with the next secret in it."""
    secrets = cycle(text for text in SECRET_TEXTS if "\n" not in text)
    return {name: f"x {next(secrets)}" for name in sorted(names) if name not in BEFORE_US}


def read_all(folder: Path) -> str:
    """Everything that was written in a folder, archives unpacked."""
    told = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".gz":
            with tarfile.open(path) as packed:
                for member in packed.getmembers():
                    file = packed.extractfile(member)
                    told.append(file.read().decode("utf-8", "replace") if file else "")
        elif path.is_file() and not path.name.startswith("in."):
            told.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(told)


def seen(text: str) -> list[str]:
    return [text[max(0, text.index(each) - 80) :][:120] for each in HIDDEN if each in text]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a configuration of DeepSpeed and a log of NCCL that hold secrets."""
    config = {"train_batch_size": 1, "wandb": {"api_key": "opensesame", "group": "x"}}
    (tmp_path / "in.ds.json").write_text(json.dumps({**config, "note": SECRET_TEXTS[0]}))
    (tmp_path / "in.log").write_text("nd0:1:2 [0] NCCL INFO x\n" + "\n".join(SECRET_TEXTS))
    return tmp_path


@pytest.mark.parametrize("redact", [(), ("--redact",)])
def test_a_run_and_all_that_is_made_of_it(folder: Path, redact: tuple[str, ...], monkeypatch):
    (folder / "out").mkdir()
    done = program(
        *("run", "--nproc-per-node", "1", "--backend", "gloo"),
        *("--select", "own_address,environment,deepspeed_config,launch_record,kernel_access"),
        *("--deepspeed-config", "in.ds.json", "--output-dir", "out", "--github", *FORMS, *redact),
        *("--path", "/mnt/token=opensesame"),
        *("--", "env", "HF_TOKEN=opensesame", "true", "--password", "opensesame"),
        cwd=folder,
        env={
            **planted(OTHERS),
            "NCCL_X": "opensesame",
            "NCCL_DEBUG_FILE": "on,token=opensesame",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        },
        timeout_s=130.0,  # its own time limit, and a little
    )
    assert (folder / "out.json").exists(), done
    assert seen(done.stdout + done.stderr) == []
    report = json.loads((folder / "out.json").read_text())
    env = report["ranks"][0]["env"]
    assert (env["NCCL_X"], env["NCCL_DEBUG_FILE"]) == ("(set)", "on,token=***")
    if not redact:
        assert report["run"]["job"]["paths"] == [["/mnt/token=***", True]]
    assert report["run"]["options"]["job"]["deepspeed_config"]["wandb"]["api_key"] == "***"
    monkeypatch.chdir(folder)
    for command in (
        *(["show", "--format", form, "out.json"] for form in ("text", *formats())),
        ["show", "--redact", "out.json"],
        *(["show", "--exit-profile", name, "out.json"] for name in ("nagios", "npd")),
        ["judge", "out.json"],
        ["merge", "out.json"],
        ["diff", "out.json", "out.json"],
        ["fixes", "out.json"],
        *(["issue", name, "out.json"] for name in issue.projects()),
        *(["issue", name, "out.json", "--no-redact"] for name in issue.projects()),
        ["bundle", "--no-tools", "--log", "in.log", "out.json", "--output", "a.gz"],
        ["bundle", "--no-tools", "--log", "in.log", "out.json", "--output", "b.gz", "--no-redact"],
    ):
        output = CliRunner().invoke(cli, ["report", *command]).output
        assert output
        assert seen(output) == [], command
    assert seen(read_all(folder)) == []


@pytest.mark.parametrize("redact", [(), ("--redact",)])
def test_what_a_launcher_says_and_what_this_host_knows(folder: Path, redact: tuple[str, ...]):
    done = program(
        *("env", "-v", "--select", "environment,launch_record,kernel_access", *FORMS, *redact),
        cwd=folder,
        env={**planted([*OTHERS, *LAUNCHER]), "MASTER_ADDR": "http://bob:opensesame@head/x"},
        timeout_s=130.0,
    )
    assert (folder / "out.json").exists(), done
    assert "launch-bad-value" in done.stdout
    assert seen(done.stdout + done.stderr + read_all(folder)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--", "env", "HF_TOKEN=opensesame", "nice", "-n", "1"),
        ("--", "HF_TOKEN=opensesame", "--password", "opensesame"),
        ("--", TORCHRUN, "--rdzv-conf", "password=opensesame,token:opensesame", "train.py"),
        ("--nnodes", "--password=opensesame"),
        ("--config", "in.toml"),
        ("--deepspeed-config", "in.bad.json"),
        ("--json", "no/token=opensesame/x"),
    ],
)
def test_error_messages(folder: Path, arguments: tuple[str, ...]):
    (folder / "in.toml").write_text('nnodes = "--api-key=opensesame"\n')
    (folder / "in.bad.json").write_text('{"token=opensesame": 1, "token=opensesame": 2}')
    told = error_of(program("run", *arguments, cwd=folder))
    assert seen(told) == []
    assert "***" in told
