"""Exit codes and lines for Slurm, node-problem-detector and Nagios."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nccl_doctor import registry
from nccl_doctor.__main__ import program as doctor
from nccl_doctor.cli import cli
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.findings import Confidence, Effect, Finding, Severity, Where
from nccl_doctor.model.report import Report
from nccl_doctor.report.profiles import NPD_BYTES, PROFILES, REASON_BYTES, profile_of, tell, unable
from nccl_doctor.toolkit.gpu.kinds import GPU_LOST
from tests.cli.program import program
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, kind, made_check, through_json

LOST = Finding(
    GPU_LOST,
    'the driver says "GPU_IS_LOST"; kernel log: Xid 79',
    Where(hosts=("nd1",), devices=("GPU-6",)),
)
SMALL = Finding(kind("shm-too-small"), "64 MiB – 1 GiB are needed", Where(hosts=("nd1",)))
BUSY = Finding(kind("gpu-busy", severity=Severity.WARN), "pid 7 | pid 8", Where(hosts=("nd0",)))


def report(*findings: Finding, hosts: tuple[str, ...] = ("nd0", "nd1"), **more: bool) -> Report:
    kinds = [finding.kind for finding in findings]
    facts = {host: {"x": 1} for host in hosts}
    cluster = make_cluster(hosts, check="made", by_host=facts, **more)
    check = made_check("made", kinds=kinds or [kind("other")], finds=findings)
    return conclude(cluster, [check], run=RUN)


FIT = report()
FAILED = report(SMALL, BUSY)
WARNED = report(BUSY)
BROKEN = report(BUSY, LOST)
PARTIAL = report(complete=False)


def told(profile: str, of: Report) -> tuple[int, str]:
    found = tell(of, profile, of.exit_code)
    assert found is not None
    assert "\n" not in found.line
    assert found.line.isascii()
    return found.code, found.line


class TestSlurm:
    """1 drains the node: only what is broken for certain, and for every job, may."""

    @pytest.mark.parametrize("of", [FIT, FAILED, WARNED, PARTIAL], ids=lambda of: of.verdict)
    def test_nothing_else_drains(self, of: Report) -> None:
        assert told("slurm", of) == (0, "")

    def test_a_lost_gpu_drains_and_says_why_in_one_line(self) -> None:
        code, reason = told("slurm", BROKEN)
        assert code == 1
        assert reason == (
            "nccl-doctor: gpu-lost on nd1: GPU-6: the driver says 'GPU_IS_LOST'; kernel log: Xid 79"
        )

    def test_the_host_itself_needs_no_name(self) -> None:
        lost = LOST.replaced(where=Where(hosts=("nd0",), devices=("GPU-6",)))
        assert " on " not in told("slurm", report(lost, hosts=("nd0",)))[1]

    @pytest.mark.parametrize(
        "less",
        [
            {"severity": Severity.WARN},
            {"confidence": Confidence.LIKELY},
        ],
        ids=str,
    )
    def test_a_doubt_does_not(self, less: dict[str, object]) -> None:
        assert told("slurm", report(SMALL, LOST.replaced(**less))) == (0, "")

    def test_nor_does_what_a_lower_layer_may_have_caused(self) -> None:
        assert told("slurm", report(SMALL, LOST)) == (0, "")

    def test_a_reason_is_one_short_harmless_line(self) -> None:
        lost = LOST.replaced(message='a\n`b` "c" $d \\ é ' + "x" * 900)
        code, reason = told("slurm", report(lost, LOST.replaced(message="and this")))
        assert code == 1
        assert len(reason) <= REASON_BYTES
        assert not set('"`$\\\n') & set(reason)
        assert reason.endswith("; and 1 more")

    def test_after_a_trip_through_a_file(self) -> None:
        assert told("slurm", through_json(BROKEN)) == told("slurm", BROKEN)

    def test_the_kinds_that_drain(self) -> None:
        # Each takes a node out of service: the list is short, and every addition a decision.
        found = {
            code
            for code, kinds in registry.load().kinds.items()
            if Effect.DRAINS in kinds[0].effects
        }
        assert found == {
            "gpu-lost",
            "gpu-unhealthy",
            "fabric-manager-down",
            "nvswitch-error",
            "memory-failing",
            "gpu-missing",  # only of GPUs that the configuration expects
        }
        page = (DOCS / "slurm.md").read_text(encoding="utf-8")
        (named,) = re.findall(r"whose code drains the host: (.*?)\. ", page)
        assert set(re.findall(r"`([\w-]+)`", named)) == found


class TestNodeProblemDetector:
    @pytest.mark.parametrize(
        ("of", "code"), [(FIT, 0), (WARNED, 0), (FAILED, 1), (BROKEN, 1), (PARTIAL, 2)]
    )
    def test_codes(self, of: Report, code: int) -> None:
        got, line = told("npd", of)
        assert got == code
        assert 0 < len(line) <= NPD_BYTES

    def test_the_message_does_not_change_with_the_values(self) -> None:
        more = report(SMALL.replaced(message="63 MiB"), BUSY)
        assert (
            told("npd", more)
            == told("npd", FAILED)
            == (
                1,
                "shm-too-small on nd1: Title of shm-too-small",
            )
        )


class TestNagios:
    @pytest.mark.parametrize(
        ("of", "code", "word"),
        [
            (FIT, 0, "OK"),
            (WARNED, 1, "WARNING"),
            (FAILED, 2, "CRITICAL"),
            (BROKEN, 2, "CRITICAL"),
            (PARTIAL, 3, "UNKNOWN"),
        ],
    )
    def test_codes(self, of: Report, code: int, word: str) -> None:
        got, line = told("nagios", of)
        assert (got, line.split(" - ")[0]) == (code, f"NCCL-DOCTOR {word}")
        text, bar, figures = line.partition(" | ")
        assert bar
        assert "|" not in text + figures
        for figure in figures.split():
            assert re.fullmatch(r"[a-z]+=[0-9.]+s?(;[0-9.]*){3}", figure), figure

    def test_the_line(self) -> None:
        assert told("nagios", FAILED)[1] == (
            "NCCL-DOCTOR CRITICAL - shm-too-small on nd1: 64 MiB - 1 GiB are needed | "
            "failures=1;;0;0 warnings=1;0;;0 time=3.5s;;;0"
        )

    def test_a_report_that_was_not_saved_is_not_ok(self) -> None:
        found = tell(FIT, "nagios", 3)
        assert found is not None
        assert found.code == 3

    def test_configuration_errors_are_not_known(self) -> None:
        found = tell(FIT, "nagios", 2)
        assert found is not None
        assert found.line.startswith("NCCL-DOCTOR UNKNOWN")


def test_native_is_told_by_the_report() -> None:
    assert tell(FAILED, "native", 1) is None
    assert unable("native", "x") is None


@pytest.mark.parametrize(("profile", "code"), [("slurm", 0), ("npd", 2), ("nagios", 3)])
def test_a_doctor_that_broke(profile: str, code: int) -> None:
    found = unable(profile, "no such\noption | x")
    assert found is not None
    assert found.code == code
    assert "\n" not in found.line
    assert bool(found.line) == (profile != "slurm")


@pytest.mark.parametrize(
    ("line", "profile"),
    [
        ("env --exit-profile slurm", "slurm"),
        ("env --exit-profile=npd --frob", "npd"),
        ("--exit-profile slurm env --exit-profile nagios", "nagios"),
        ("env", "native"),
        ("env --exit-profile", "native"),
        ("env --exit-profile zabbix", "native"),
        ("run -- x --exit-profile slurm", "native"),
    ],
)
def test_the_profile_of_a_line_that_may_be_wrong(line: str, profile: str) -> None:
    assert profile_of(line.split()) == profile


# --- the command line ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "report.json"
    file.write_text(json.dumps(BROKEN.to_json()))
    return file


@pytest.mark.parametrize("command", ["show", "judge", "merge"])
@pytest.mark.parametrize(("profile", "code"), [("slurm", 1), ("npd", 1), ("nagios", 2)])
def test_a_saved_report(saved: Path, command: str, profile: str, code: int) -> None:
    done = CliRunner().invoke(cli, ["report", command, str(saved), "--exit-profile", profile])
    assert done.exit_code == code, done.output
    (line,) = done.output.splitlines()
    assert "gpu-lost" in line or profile != "slurm"


def test_show_alone_exits_with_0(saved: Path) -> None:
    assert CliRunner().invoke(cli, ["report", "show", str(saved)]).exit_code == 0
    done = CliRunner().invoke(cli, ["report", "show", str(saved), "--exit-profile", "native"])
    assert done.exit_code == 1
    assert len(done.output.splitlines()) > 3


USAGE_ERRORS = {
    "run --frobnicate --exit-profile {}": "No such option",
    "run --exit-profile {} --json -": "only one of them can use stdout",
    "run --exit-profile {} -- true": "the exit code is that of the command",
    "report show nosuch.json --exit-profile {}": "cannot read nosuch.json",
    "report show --format json SAVED --exit-profile {}": "only one of them can use stdout",
}


@pytest.mark.parametrize(("profile", "code"), [("slurm", 0), ("npd", 2), ("nagios", 3)])
def test_usage_errors(
    saved: Path, profile: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, words in USAGE_ERRORS.items():
        given = line.format(profile).replace("SAVED", str(saved)).split()
        monkeypatch.setattr(sys, "argv", ["nccl-doctor", *given])
        streams = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
        for name, stream in streams.items():  # which it takes for its own
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, "utf-8"))
        left = doctor()
        out, err = (stream.getvalue().decode() for stream in streams.values())
        assert left == code, line
        assert words in err
        assert len(out.splitlines()) == (0 if profile == "slurm" else 1), line


def test_a_file_that_says_both_fail_and_success_is_not_ok(saved: Path, tmp_path: Path) -> None:
    data = {**json.loads(saved.read_text()), "exit_code": 0}
    (tmp_path / "both.json").write_text(json.dumps(data))
    done = program("report", "show", "both.json", "--exit-profile", "nagios", cwd=tmp_path)
    assert done.returncode == 3, done
    assert done.stdout.startswith("NCCL-DOCTOR UNKNOWN - ")


def test_this_host_for_nagios_in_one_line_and_nothing_else() -> None:
    done = program("env", "--select", "temp_dir", "--exit-profile", "nagios")
    assert done.returncode == 0, done
    (line,) = done.stdout.splitlines()
    assert line.startswith("NCCL-DOCTOR OK - No failure found on this host alone")


def test_the_profiles_are_frozen() -> None:
    assert PROFILES == ("native", "slurm", "npd", "nagios")


# --- the recipes ---

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def script(name: str) -> str:
    (found,) = [text for text in blocks("slurm.md", "sh") if f"# /etc/slurm/{name}" in text]
    return found


def run_script(text: str, folder: Path, doctor: str, state: str = "IDLE") -> tuple[int, list[str]]:
    """A recipe, with a doctor that ends like this, and what Slurm and syslog were told."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    for name, body in {
        "nccl-doctor": doctor,
        "scontrol": f'[ "$1" = update ] || {{ echo State={state}; exit; }}\n'
        f'printf "%s\\n" "$@" >> {told}',
        "logger": f'printf "%s\\n" "$@" >> {told}',
    }.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    file = folder / "script"
    file.write_text(text.replace("PATH=/opt/nccl-doctor/bin:", f"PATH={folder}:"))
    done = subprocess.run(
        ["sh", str(file)],
        env={"SLURMD_NODENAME": "n7"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, told.read_text().splitlines() if told.exists() else []


REASON = "nccl-doctor: gpu-lost: GPU-6: the driver says 'GPU_IS_LOST'"
ENDS = {
    "fit": "exit 0",
    "crash": "echo Traceback >&2; exit 1",
    "crash that talks": "echo oops; exit 1",
    "not completed": f'echo "{REASON}"; exit 3',
    "killed": "kill -9 $$",
    "not installed": "exit 127",
}


@pytest.mark.parametrize("name", ["nccl-doctor-health.sh", "nccl-doctor-prolog.sh"])
def test_a_doctor_that_hangs_is_ended_and_drains_nothing(name: str, tmp_path: Path) -> None:
    text, times = re.subn(r"timeout -k \d+ \d+", "timeout -k 0.2 0.2", script(name))
    assert times == 1
    hangs = f"trap '' TERM; echo \"{REASON}\"; while :; do sleep 0.1; done"
    assert run_script(text, tmp_path, hangs) == (0, [])


@pytest.mark.parametrize("doctor", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("name", ["nccl-doctor-health.sh", "nccl-doctor-prolog.sh"])
def test_a_broken_doctor_never_drains(name: str, doctor: str, tmp_path: Path) -> None:
    assert run_script(script(name), tmp_path, doctor) == (0, [])


def test_the_health_check_drains_with_the_reason(tmp_path: Path) -> None:
    text = script("nccl-doctor-health.sh")
    code, told = run_script(text, tmp_path, f'echo "{REASON}"; exit 1')
    assert code == 0
    assert told == ["update", "NodeName=n7", "State=DRAIN", f"Reason={REASON}"]


def test_a_node_that_is_drained_keeps_its_reason(tmp_path: Path) -> None:
    text = script("nccl-doctor-health.sh")
    assert run_script(text, tmp_path, f'echo "{REASON}"; exit 1', "IDLE+DRAIN") == (0, [])


def test_the_prolog_fails_and_logs_the_reason(tmp_path: Path) -> None:
    text = script("nccl-doctor-prolog.sh")
    code, told = run_script(text, tmp_path, f'echo "{REASON}"; exit 1')
    assert (code, told) == (1, ["-t", "nccl-doctor", REASON])


@pytest.mark.parametrize("text", blocks("slurm.md", "sh"), ids=lambda text: text.split("\n")[1])
def test_shell_blocks_are_shell(text: str) -> None:
    done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_call_in_the_recipes_is_one_that_the_program_takes() -> None:
    found = {name for check in registry.load().checks for name in (check.name,)}
    for page in ("slurm.md", "monitoring.md"):
        text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
        calls = re.findall(r"nccl-doctor (env|run)\b([^\n`|&;)]*)", text)
        calls += [
            (rule["args"][0], " ".join(rule["args"][1:]))
            for block in blocks(page, "json")
            for rule in json.loads(block)["rules"]
        ]
        assert calls
        for command, rest in calls:
            own = rest.partition(" -- ")[0].partition(" #")[0].partition("2>")[0]
            known = {opt for param in cli.commands[command].params for opt in param.opts}
            words = own.replace("=", " ").split()
            assert {word for word in words if word.startswith("--")} <= known, own
            for names in re.findall(r"--select[ =](\S+)", own):
                assert set(names.split(",")) <= found
            for profile in re.findall(r"--exit-profile[ =](\S+)", own):
                assert profile in PROFILES
