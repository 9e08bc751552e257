"""A saved report from a stranger: whose fix it is, and a verdict that it does not bear out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.kernel_limits import KernelLimits
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.own_fixes import OF_FILE
from nccl_doctor.report.formats import json as json_format
from tests.cli.program import error_of, program
from tests.support.clusters import make_cluster
from tests.support.reports import RUN

OWN = 'sysctl -w net.ipv4.ip_local_port_range="1024 65535"'
FORGED = "touch /tmp/x"
FACTS = {
    "somaxconn": 4096,
    "abort_on_overflow": False,
    "range": [50000, 50039],
    "taken": 20,
    "time_wait": 0,
    "reserved": 0,
    "local_ranks": 8,
}
Forge = Callable[..., Path]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """A file of a true report with an error of `ports-exhausted` on nd1, and what differs in it."""
    facts = {"nd0": {**FACTS, "range": [32768, 60999]}, "nd1": FACTS}
    cluster = make_cluster(check="kernel_limits", by_host=facts)
    text = json_format.render(conclude(cluster, [KernelLimits()], run=RUN))

    def write(
        step: dict[str, Any] | None = None, finding: dict[str, Any] | None = None, **fields: Any
    ) -> Path:
        data = json.loads(text)
        for each in (*data["findings"], *data["root_causes"]):
            each["fix_steps"][0].update(step or {})
            each.update(finding or {})
        data.update(fields)
        file = tmp_path / "report.json"
        file.write_text(json.dumps(data))
        return file

    return write


def typed(*arguments: str) -> list[str]:
    """Lines that a shell takes, of what is printed."""
    done = program(*arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line[:1] not in ("", "#", " ")]


def test_commands_of_ours_stay(forge: Forge) -> None:
    file = str(forge())
    assert any(line.startswith(OWN) for line in typed("report", "fixes", "--host", "nd1", file))
    assert OF_FILE not in program("report", "show", file).stdout


@pytest.mark.parametrize(
    "step", [{"command": FORGED}, {"undo": FORGED}, {"hosts": ["nd0", "nd1"]}, {"hosts": ["nd0"]}]
)
def test_a_command_of_the_file_is_a_comment(forge: Forge, step: dict[str, Any]) -> None:
    file = str(forge(step))
    for host in ("nd0", "nd1"):
        assert typed("report", "fixes", "--host", host, file) == []
    script = program("report", "fixes", file).stdout
    assert f"# {OF_FILE}" in script
    assert not any(line.startswith((FORGED, OWN)) for line in script.splitlines())


@pytest.mark.parametrize("form", ["text", "markdown", "html", "json", "junit"])
def test_it_is_said_to_be_of_the_file_in_every_form(forge: Forge, form: str) -> None:
    shown = program("report", "show", "--format", form, str(forge({"command": FORGED}))).stdout
    assert (f"# {FORGED}" if form != "html" else f'<p class="on">{FORGED}</p>') in shown
    assert f"<code>{FORGED}" not in shown
    words = " ".join(shown.split())
    assert "this stands in the file" in words


def test_a_command_for_no_host_is_a_comment_too(forge: Forge) -> None:
    shown = program("report", "show", str(forge({"command": FORGED, "hosts": []}))).stdout
    assert [line.strip() for line in shown.splitlines() if FORGED in line] == [f"# {FORGED}"]


def test_a_report_that_nobody_can_judge_again_has_comments(forge: Forge) -> None:
    """As one of a check that is not installed here, and without facts."""
    file = str(forge(finding={"check": "another", "code": "another-fault"}, hosts=[], ranks=[]))
    assert typed("report", "fixes", file) == []


def test_what_is_judged_or_merged_has_no_command_of_the_file(forge: Forge) -> None:
    file = str(forge({"command": FORGED}, finding={"check": "another", "code": "another-fault"}))
    for command in ("judge", "merge"):
        done = program("report", command, "--json", "-", file)
        steps = [
            step["command"]
            for finding in json.loads(done.stdout)["findings"]
            for step in finding["fix_steps"]
        ]
        assert f"# {FORGED}" in steps
        assert FORGED not in steps
        assert any(step.startswith(OWN) for step in steps)


@pytest.mark.parametrize("verdict", ["pass", "warn"])
@pytest.mark.parametrize("command", ["show", "fixes", "issue"])
def test_a_verdict_that_its_findings_contradict_is_refused(
    forge: Forge, verdict: str, command: str
) -> None:
    file = str(forge(verdict=verdict, exit_code=0))
    done = program("report", command, *(["nccl"] if command == "issue" else []), file)
    assert done.returncode == 2
    assert "contradicts itself" in error_of(done)
    assert program("report", "judge", file).returncode == 1


@pytest.mark.parametrize(("profile", "code"), [("slurm", 2), ("npd", 2), ("nagios", 3)])
def test_no_profile_calls_it_in_order(forge: Forge, profile: str, code: int) -> None:
    file = str(forge(verdict="pass", exit_code=0, findings=[]))  # the root cause is left
    done = program("report", "show", "--exit-profile", profile, file)
    assert done.returncode == code
    assert "contradicts itself" in done.stderr
