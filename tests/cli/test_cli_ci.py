"""In CI: what docs/ci.md and action.yml would have a runner execute, executed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.program import CLEAN, program
from tests.ranks.test_bad_plugin import MISTAKES, install
from tests.support.forkserver import quick_python_path
from tests.support.reports import validate

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
DEFAULTS = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}


def act(
    folder: Path, *, path: Path | None = None, **inputs: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The last step of the action as GitHub's runner starts it; the process and the outputs.

    `path` is one more folder of modules for Python.
    """
    step = ACTION["runs"]["steps"][-1]
    given = {**DEFAULTS, "python": quick_python_path(), **inputs}
    env = {
        name: re.sub(r"\$\{\{ inputs\.([a-z]+) \}\}", lambda found: given[found[1]], value)
        for name, value in step["env"].items()
    }
    script = folder / "step.sh"
    script.write_text(step["run"])
    output = folder / "output"
    output.touch()
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        cwd=folder,
        env={
            **CLEAN,
            **env,
            "GITHUB_ACTIONS": "true",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            **({} if path is None else {"PYTHONPATH": f"{ROOT}:{path}"}),
        },
        timeout=150,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = output.read_text().splitlines()
    return done, dict(line.split("=", 1) for line in lines)


def outcomes(path: Path) -> dict[str, str]:
    """Name of each case → the element that says why it did not pass."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        tags = [element.tag for element in case if element.tag != "system-out"]
        found[f"{case.get('classname')} {case.get('name')}"] = tags[0] if tags else ""
    return found


def test_the_action_on_a_runner_that_is_fit(tmp_path: Path):
    (tmp_path / "summary.md").write_text("of the same step, before")
    done, told = act(tmp_path, gpus="0", args="--select ranks  --nproc-per-node 1")
    assert done.returncode == 0, done
    assert told == {
        "verdict": "pass",
        "exit-code": "0",
        "report": "nccl-doctor.json",
        "junit": "nccl-doctor.xml",
    }
    validate(json.loads((tmp_path / "nccl-doctor.json").read_text()))
    found = outcomes(tmp_path / "nccl-doctor.xml")
    assert found["nccl_doctor.verdict verdict"] == ""
    assert set(found.values()) == {""}
    assert "::error" not in done.stdout
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("of the same step, before\n## ✅ nccl-doctor: PASS\n")


def test_the_action_on_a_runner_with_too_few_gpus(tmp_path: Path):
    wanted = tmp_path / "nccl-doctor.toml"
    wanted.write_text("[expected]\ngpus-per-host = 99\n")
    done, told = act(tmp_path, gpus="0", args="--select backend_device --nproc-per-node 1")
    assert done.returncode == 1, done
    assert (told["verdict"], told["exit-code"]) == ("fail", "1")
    data = json.loads((tmp_path / told["report"]).read_text())
    (root,) = data["root_causes"]
    (host,) = data["hosts"]
    assert root["code"] == "gpu-missing"
    assert root["where"]["hosts"] == [host["host"]]
    assert "expected 99 per host" in root["message"]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    assert line.startswith("::error title=gpu-missing%3A ")
    assert host["host"] in line
    assert done.stdout.index("exit code 1") < done.stdout.index("::error")
    found = outcomes(tmp_path / told["junit"])
    assert found[f"device.backend_device backend_device[{host['host']}]"] == "failure"
    assert found["nccl_doctor.verdict verdict"] == "failure"
    assert "`gpu-missing`" in (tmp_path / "summary.md").read_text()

    # What the page says to make of the report, as a shell runs it.
    lines = re.findall(r"^(nccl-doctor report show .*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        shell = f'nccl-doctor() {{ "{quick_python_path()}" -m nccl_doctor "$@"; }}\n{line}'
        ran = subprocess.run(
            ["bash", "-ec", shell], cwd=tmp_path, env=CLEAN, capture_output=True, check=False
        )
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
    assert (tmp_path / "nccl-doctor.md").read_text() == (tmp_path / "summary.md").read_text()
    assert "nccl_doctor_exit_code 1\n" in (tmp_path / "nccl-doctor.prom").read_text()


@pytest.mark.parametrize("gpus", ["", "eight", "-1"])
def test_the_action_needs_to_know_how_many_gpus(tmp_path: Path, gpus: str):
    done, told = act(tmp_path, gpus=gpus)
    assert (done.returncode, told) == (2, {})
    assert done.stdout.startswith("::error title=nccl-doctor::the input gpus")


def test_the_action_is_red_where_nothing_could_be_asked(tmp_path: Path):
    (tmp_path / "nccl-doctor.json").write_text('{"verdict": "pass"}')
    for inputs in ({"python": "/no/such/python"}, {"args": "--no-such-option"}):
        done, told = act(tmp_path, gpus="0", **inputs)
        assert done.returncode != 0
        assert told["verdict"] == "unknown"
        assert told["report"] == told["junit"] == ""
        (tmp_path / "output").unlink()


RED = {  # what happens on a runner → more options, exit code
    "nothing was measured": ("--select roce_gids --level quick --nproc-per-node 1", 3),
    "a check broke": ("--select bad,own_address --nproc-per-node 1", 3),
    "fewer hosts than asked for": (
        "--select ranks --nproc-per-node 1 --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 "
        "--master-port PORT --join-timeout 2",
        1,
    ),
}


@pytest.mark.parametrize("case", RED)
def test_the_action_fails_closed(tmp_path: Path, case: str):
    options, code = RED[case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plugin = install(tmp_path / "plugin", {"bad": MISTAKES["cannot_look"][0]})
    done, told = act(tmp_path, path=plugin, gpus="0", args=options.replace("PORT", str(port)))
    assert done.returncode == code, done
    assert told["verdict"] == ("fail" if code == 1 else "unknown")
    assert told["exit-code"] == str(code)
    kind = "failure" if code == 1 else "error"
    assert outcomes(tmp_path / told["junit"])["nccl_doctor.verdict verdict"] == kind
    assert "\n::error title=" in done.stdout
    mark = "❌" if code == 1 else "❓"
    assert (tmp_path / "summary.md").read_text().startswith(f"## {mark} nccl-doctor: ")


def test_the_step_that_installs_asks_the_python_of_the_job_for_this_source(tmp_path: Path):
    step = ACTION["runs"]["steps"][0]
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "step.sh"
    script.write_text(step["run"])
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        env={**CLEAN, "PYTHON": str(python), "SOURCE": "/where the/action is"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[:3] == ["-m", "pip", "install"]
    assert words[-1] == "/where the/action is"
    assert (ROOT / "pyproject.toml").is_file(), "which is what pip is given"


def test_the_lines_for_gitlab_and_jenkins_are_red_without_the_gpus(tmp_path: Path):
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    few = text.replace("nproc-per-node = 8", "nproc-per-node = 1").replace("= 8", "= 99")
    (tmp_path / "nccl-doctor.toml").write_text(few)
    (line,) = {*re.findall(r"(?:    - |sh ')(nccl-doctor run [^'\n]*)", PAGE)}
    done = program(*line.split()[1:], "--select", "backend_device", cwd=tmp_path, timeout_s=150)
    assert done.returncode == 1, done
    codes = {"gpu-missing", "nccl-unavailable", "backend-device-mismatch"}  # what lacks is said
    assert codes & set(re.findall(r"\[([a-z-]+)\]", done.stdout))
    assert "::error" not in done.stdout, "GITHUB_ACTIONS is not set"
    assert outcomes(tmp_path / "nccl-doctor.xml")["nccl_doctor.verdict verdict"] == "failure"
    validate(json.loads((tmp_path / "nccl-doctor.json").read_text()))


def test_where_stdout_is_taken_and_where_it_is_refused(tmp_path: Path):
    saved = tmp_path / "saved.json"
    (tmp_path / "nccl-doctor.toml").write_text("[expected]\ngpus-per-host = 99\n")
    arguments = ("--backend", "gloo", "--select", "backend_device")
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "folder")}
    done = program("env", *arguments, "--json", str(saved), cwd=tmp_path, env=github)
    assert done.returncode == 1, done
    assert "\n::error title=gpu-missing" in done.stdout
    assert "nccl-doctor: the step summary was not written: " in done.stderr

    judged = program("report", "judge", str(saved), "--json", "-", "--github")
    assert judged.returncode == 1
    validate(json.loads(judged.stdout))
    assert judged.stderr.startswith("::error title=gpu-missing")
    quiet = program("report", "judge", str(saved), "--no-github", env={"GITHUB_ACTIONS": "true"})
    assert quiet.returncode == 1
    assert "::error" not in quiet.stdout + quiet.stderr

    for form in ("junit", "markdown", "prometheus"):
        shown = program(
            *("report", "show", str(saved), "--format", form),
            env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "gpu-missing" in shown.stdout
