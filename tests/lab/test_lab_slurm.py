"""Real Slurm: `srun` without any flag, and the batch script of docs/slurm.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab import slurm
from tests.lab.lab import Lab
from tests.lab.reading import check_cause, check_healthy
from tests.lab.slurm import Slurm
from tests.support.waiting import comes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "slurm.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TRAIN = """
import os
for name in ("SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT"):
    print(name, os.environ[name], flush=True)
"""


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := slurm.impossible():
        pytest.skip(reason)
    if reason := slurm.missing():
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"CI=true, so Slurm must run: {reason}", pytrace=False)
        pytest.skip(reason)


def test_slurm(make_lab: Callable[..., Lab]) -> None:
    """One cluster for all of it: it takes longer to start than to use."""
    cluster = Slurm(make_lab("nd0", "nd1"))
    srun_without_any_flag(cluster)
    a_flag_against_srun(cluster)
    a_fault_on_one_host(cluster)
    the_batch_script(cluster)
    the_job_after_one_that_failed(cluster)


def srun_without_any_flag(cluster: Slurm) -> None:
    select = "launch_record,own_name,port,ranks,collectives,slurm_allocation"
    run = cluster.doctor(["-N2", "--ntasks-per-node=2"], f"--select={select}")
    check_healthy(run, ranks=4)
    report: Mapping[str, Any] = run.report or {}
    assert report["run"]["launcher"] == "srun"
    assert (report["run"]["world_size"], report["run"]["nnodes"]) == (4, 2)
    assert [host["host"] for host in report["hosts"]] == ["nd0", "nd1"]
    assert [host["node_rank"] for host in report["hosts"]] == [0, 1]
    assert [(rank["host"], rank["rank"], rank["local_rank"]) for rank in report["ranks"]] == [
        *(("nd0", 0, 0), ("nd0", 1, 1)),
        *(("nd1", 2, 0), ("nd1", 3, 1)),
    ]
    sources = report["ranks"][3]["launch"]["sources"]
    assert sources["rank"] == "SLURM_PROCID"
    assert sources["master_addr"] in (
        "derived from SLURM_STEP_NODELIST",
        "derived from SLURM_JOB_NODELIST",
    )
    (note,) = [found for found in report["findings"] if found["code"] == "master-not-set"]
    assert note["message"].startswith("MASTER_ADDR not set, nd0 by SLURM_")
    (told,) = [found for found in report["findings"] if found["code"] == "rank-not-set"]
    assert told["severity"] == "info"
    assert "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_" in told["fix"]
    assert "[rank-not-set]" in run.done[0].stdout, str(run)
    passed = "nccl-doctor: PASS: 6 checks passed for 4 ranks on 2 hosts"
    assert run.done[0].stdout.count(passed) == 1, str(run)
    assert cluster.rest() == []


def a_flag_against_srun(cluster: Slurm) -> None:
    run = cluster.doctor(["-N2", "--ntasks-per-node=1"], "--nnodes", "3")
    assert run.codes == [2], str(run)
    assert "--nnodes 3: srun has 2 (SLURM_" in run.done[0].stderr


def a_fault_on_one_host(cluster: Slurm) -> None:
    nd1 = cluster.lab["nd1"]
    nd1.set_hosts(cluster.lab.names_text(nd1=""))
    run = cluster.doctor(["-N2", "--ntasks-per-node=1"], "--level=quick", "--select=own_name,ranks")
    check_cause(run, run.report, "addr-unresolvable", hosts=["nd1"])
    assert run.codes == [1], "all tasks leave with the verdict, and srun with theirs"
    cluster.lab.restore_names()


def the_batch_script(cluster: Slurm) -> None:
    """As on the page, but for the GPUs, and with one task on each host."""
    (script,) = [text for text in SCRIPTS if "#SBATCH" in text]
    script = script.replace("#SBATCH --gpus-per-node=8\n", "").replace("node=8", "node=1")
    folder, env = folder_with_program(cluster)
    (folder / "job.sh").write_text(script)
    (folder / "train.py").write_text(TRAIN)
    (folder / "nccl-doctor.toml").write_text(
        'backend = "gloo"\nlevel = "quick"\nselect = ["launch_record", "ranks", "slurm_allocation"]'
    )
    done = cluster.client("sbatch", "--wait", "job.sh", folder=folder, env=env, timeout_s=60.0)
    (output,) = folder.glob("slurm-*.out")
    text = output.read_text()
    assert done.poll() == 0, text
    assert text.index("nccl-doctor: PASS") < text.index("SLURM_PROCID 1")
    assert text.count("MASTER_ADDR nd0") == 2
    assert (folder / "report.json").exists()
    (folder / "nccl-doctor.toml").write_text('backend = "gloo"\nselect = ["no_such_check"]')
    output.unlink()
    done = cluster.client("sbatch", "--wait", "job.sh", folder=folder, env=env, timeout_s=60.0)
    (output,) = folder.glob("slurm-*.out")
    assert done.poll() == 2, output.read_text()
    assert "SLURM_PROCID" not in output.read_text(), "the job does not start"


def the_job_after_one_that_failed(cluster: Slurm) -> None:
    """The lines of the page, typed: the second job names the task that raised in the first."""
    (lines,) = [text for text in SCRIPTS if "afternotok" in text]
    folder, env = folder_with_program(cluster)
    (folder / "job.sh").write_text("#!/bin/sh\n#SBATCH --nodes=2\nsrun -l python3 train.py\n")
    (folder / "train.py").write_text("import os\n{'0': 0}[os.environ['SLURM_PROCID']]\n")
    done = cluster.client("sh", "-c", lines, folder=folder, env=env, timeout_s=20.0)
    assert done.poll() == 0, done.stderr
    told = comes(
        lambda: [text for path in folder.glob("autopsy-*") if "Next:" in (text := path.read_text())]
    )
    assert told, [path.read_text() for path in folder.glob("*.out")]
    assert "[rank-raised]\n  where rank 1\n" in told[0], told[0]
    assert "KeyError: '1'" in told[0]


def folder_with_program(cluster: Slurm) -> tuple[Path, dict[str, str]]:
    """A folder that all hosts share with nccl-doctor in it, and the PATH that finds it."""
    folder = cluster.lab.new_folder()
    program = folder / "nccl-doctor"
    program.write_text(f'#!/bin/sh\nexec {cluster.lab.python} -m nccl_doctor "$@"\n')
    program.chmod(0o755)
    return folder, {"PATH": f"{folder}:{cluster.lab.env['PATH']}"}
