"""`run … -- COMMAND`: what is read from it, when it runs, and with what environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import CLEAN, program
from tests.ranks.ranks import free_port
from tests.support.forkserver import quick_python_path

Done = subprocess.CompletedProcess[str]
QUICK = ("--backend", "gloo", "--select", "ranks,torch_import,interfaces")
# One write for each line: the ranks share the pipe.
PRINTS = """
import os

os.write(1, "job {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., tuple[Done, dict[str, Any]]]:
    """Run with this command; what it did, and the report."""

    def run_it(
        *command: str, options: Sequence[str] = (), **more: Any
    ) -> tuple[Done, dict[str, Any]]:
        path = tmp_path / "report.json"
        done = program(
            *("run", "--quiet", "--json", str(path), *QUICK, *options, "--", *command),
            cwd=tmp_path,
            **more,
        )
        return done, json.loads(path.read_text())

    return run_it


def torchrun() -> tuple[str, ...]:
    return quick_python_path(), "-m", "torch.distributed.run"


def alone() -> list[str]:
    """Options of a run that shares no port with another test's."""
    return ["--nproc-per-node", "2", "--master-port", str(free_port())]


def test_the_command_follows_a_good_verdict_with_its_own_exit_code(examine):
    done, report = examine("sh", "-c", "echo follows; exit 7", options=alone())
    assert report["verdict"] == "pass"
    assert done.returncode == 7, done
    assert done.stdout.splitlines()[-1] == "follows"


def test_its_environment_is_the_one_that_we_were_given(examine):
    done, _ = examine("printenv", options=alone(), env={"MARK": "1"})
    after = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert after["MARK"] == "1"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCH_CPP_LOG_LEVEL")
    assert not [name for name in names if name in after]
    assert after["RES_OPTIONS"] == CLEAN["RES_OPTIONS"]


def test_it_does_not_follow_a_failure(examine):
    done, report = examine(
        "echo", "follows", options=alone(), env={"GLOO_SOCKET_IFNAME": "no-such-nic"}
    )
    assert report["verdict"] == "fail"
    assert done.returncode == 1
    assert "follows" not in done.stdout
    assert "nccl-doctor: not started: echo follows\n" in done.stderr


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 3)])
def test_a_command_that_names_hosts_which_nobody_examined(examine, strict, code):
    done, report = examine(
        *("sh", "-c", "echo follows", "train", "--nnodes", "2"), options=[*alone(), *strict]
    )
    assert (report["verdict"], report["exit_code"], done.returncode) == ("unknown", code, code)
    assert [each["code"] for each in report["root_causes"]] == ["hosts-not-examined"]
    assert ("follows" in done.stdout.splitlines()) is (code == 0)
    assert "only this host was examined: the command says --nnodes 2" in done.stdout


@pytest.mark.parametrize(
    ("options", "verdict", "code"),
    [((), "unknown", 0), (("--strict",), "unknown", 3), (("--nnodes", "1"), "pass", 0)],
)
def test_an_allocation_of_which_one_host_was_examined(tmp_path, options, verdict, code):
    path = tmp_path / "report.json"
    done = program(
        *("run", "--quiet", "--json", str(path), *QUICK, *alone(), *options),
        env={"LSB_MCPU_HOSTS": "nd0 2 nd1 2"},
    )
    assert (json.loads(path.read_text())["verdict"], done.returncode) == (verdict, code)
    said = "only this host was examined: LSB_MCPU_HOSTS has 2 hosts" in done.stdout
    assert said is (verdict == "unknown")


def test_its_arguments_are_not_recorded(examine):
    _, report = examine("true", "--token", "secret", options=alone())
    assert report["run"]["command"].endswith(" -- true …")
    assert "secret" not in json.dumps(report)


def test_the_topology_is_read_from_torchrun(examine, tmp_path):
    (tmp_path / "job.py").write_text(PRINTS)
    done, report = examine(*torchrun(), "--nproc-per-node", "3", "job.py")
    assert done.returncode == 0, done
    assert report["run"]["world_size"] == 3
    told = report["run"]["options"]["job"]
    assert (told["launcher"], told["rendezvous"]["backend"]) == ("torchrun", "static")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("job"))
    assert said == [f"job {rank} of 3" for rank in range(3)]


def test_the_command_counts_for_the_ranks_of_a_pod(examine):
    """Trainer v2 sets PET_NPROC_PER_NODE=auto; torchrun takes its option first."""
    pod = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    line = (*torchrun(), "--nproc-per-node", "3", "--no-python", "echo")
    done, report = examine(*line, env=pod)
    assert done.returncode == 0, done
    assert report["run"]["world_size"] == 3


def test_an_elastic_job_follows_with_the_hosts_that_came(examine, tmp_path):
    (tmp_path / "job.py").write_text(PRINTS)
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=e")
    options = ("--join-timeout=3", "--timeout=60")
    line = (*torchrun(), "--nnodes=1:3", *meet, "--rdzv-conf=last_call_timeout=1")
    done, report = examine(*line, "--local-addr=localhost", "job.py", options=options)
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-1] == "job 0 of 1"
    assert (report["verdict"], report["run"]["world_size"]) == ("pass", 1)
    (found,) = (each for each in report["findings"] if each["code"] == "hosts-fewer-than-most")
    assert (found["severity"], found["message"][:24]) == ("info", "1 host is here, of 1 to ")
    assert "elastic-without-restarts" in [each["code"] for each in report["findings"]]


def test_the_pods_of_an_elastic_job_meet_by_its_variables_alone(tmp_path):
    """As Kubeflow's operator sets them for an ElasticPolicy, in an init container or a script."""
    path = tmp_path / "report.json"
    pod = {
        "PET_NNODES": "1:3",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "PET_RDZV_ID": "llm",
        "PET_MAX_RESTARTS": "3",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    options = ("--quiet", "--json", str(path), *QUICK, "--join-timeout=3", "--timeout=60")
    done = program("run", *options, cwd=tmp_path, env=pod)
    report = json.loads(path.read_text())
    assert (done.returncode, report["verdict"]) == (0, "pass"), done
    assert "PET_NNODES 1:3: waits for 3 hosts, and is content with 1" in done.stderr
    told = report["run"]["options"]["job"]
    assert (told["launcher"], told["elastic"], told["max_restarts"]) == ("torchrun", [1, 3], 3)
    assert [rank["rank"] for rank in report["ranks"] if rank["reported"]] == [0, 1]
    (found,) = (each for each in report["findings"] if each["code"] == "hosts-fewer-than-most")
    assert (found["severity"], found["message"][:24]) == ("info", "1 host is here, of 1 to ")


def test_what_the_line_sets_for_its_ranks_is_examined(examine, tmp_path):
    (tmp_path / "job.py").write_text(PRINTS)
    line = ("env", "GLOO_SOCKET_IFNAME=no-such-nic", *torchrun(), "job.py")
    done, report = examine(*line)
    assert done.returncode == 1
    assert [root["code"] for root in report["root_causes"]] == ["interface-missing"]


def test_a_hostfile_of_deepspeed_goes_over_ssh(tmp_path):
    """The first host cannot be reached: so the examination went there, and the job did not."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/sh\necho "ssh: connect to host a port 22: Connection refused" >&2\nexit 255\n'
    )
    ssh.chmod(0o755)
    deepspeed = ssh.with_name("deepspeed")
    deepspeed.write_text("#!/bin/sh\necho follows\n")
    deepspeed.chmod(0o755)
    (tmp_path / "hosts").write_text("gpu-a slots=1\ngpu-b slots=1\n")
    (tmp_path / "train.py").touch()
    path = f"{ssh.parent}:{CLEAN['PATH']}"
    done = program(
        *("run", "--json", "r.json", "--timeout", "30", "--join-timeout", "5", "--"),
        *("deepspeed", "--hostfile", "hosts", "train.py"),
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path)},
    )
    assert done.returncode == 1, done
    assert "follows" not in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    (root,) = report["root_causes"]
    assert root["code"] == "ssh-failed"
    assert root["where"]["hosts"] == ["gpu-a", "gpu-b"]
