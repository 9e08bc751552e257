"""`run --hostfile`: what a user types, and the end of the line on the other host.

The ssh here is a script that gets in to this very host; the lab has a real one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from nccl_doctor.launch.ssh.connection import MARKER, instructions
from nccl_doctor.model.options import Options
from tests.cli.program import CLEAN, error_of, program
from tests.ranks.ranks import free_port
from tests.support.forkserver import quick_python_path
from tests.support.reports import validate
from tests.support.waiting import until

SSH = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
[ "$1" = -G ] && { echo "hostname localhost"; exit 0; }
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
case $host in
    noisy) echo "Welcome to $host"; echo "No mail." >&2 ;;
    slow) sleep 1 ;;
    away) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255 ;;
    other) echo "bash: line 1: exec: env: not found" >&2; exit 127 ;;
    stuck) exec sleep 60 ;;
    gpu*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255 ;;
esac
exec sh -c "$*"
"""
QUICK = ("--backend", "gloo", "--select", "ranks,torch_import", "--join-timeout", "20")
Run = Callable[..., subprocess.CompletedProcess[str]]


PLANTED = ("json", "torch", "psutil", "sitecustomize", "click", "runpy", "nccl_doctor")


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[None]:
    """Everybody may write to the folder where a test runs, and somebody has: nobody runs that."""
    tmp_path.chmod(0o777)
    for name in PLANTED:
        code = f"open({str(tmp_path / 'pwned')!r}, 'a').write({name + ' '!r})\n"
        (tmp_path / f"{name}.py").write_text(code)
    yield
    assert not (tmp_path / "pwned").exists(), (tmp_path / "pwned").read_text()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "bin" / "ssh"
    file.parent.mkdir()
    file.write_text(SSH)
    file.chmod(0o755)
    path = f"{file.parent}:{os.environ['PATH']}"
    return {"PATH": path, "SSH_LOG": str(tmp_path / "log"), "HOME": str(tmp_path)}


@pytest.fixture
def run(tmp_path: Path, env: dict[str, str]) -> Run:
    """Run with a hostfile of these lines."""

    def run_one(lines: str, *options: str, **more) -> subprocess.CompletedProcess[str]:
        (tmp_path / "hosts").write_text(lines)
        more["env"] = {**CLEAN, **env, **more.get("env", {})}
        port = ("--master-port", str(free_port()))  # other tests run at the same time
        return subprocess.run(
            [
                quick_python_path(),
                "-m",
                "nccl_doctor",
                "run",
                "--hostfile",
                "hosts",
                *port,
                *options,
            ],
            cwd=tmp_path,
            timeout=90,
            capture_output=True,
            text=True,
            check=False,
            **more,
        )

    return run_one


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path):
    yield
    until(lambda: not _with(str(tmp_path)), 10, said=lambda: _with(str(tmp_path)))


def _with(folder: str) -> list[str]:
    """Processes that this test started, by their environment."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.pid != os.getpid() and process.environ().get("HOME") == folder:
                found.append(str(process.info["cmdline"]))
        except psutil.Error:
            continue
    return found


# --- as a user types it ---


def test_a_thousand_hosts_and_too_few_open_files(run: Run) -> None:
    """One line, and no ssh is started."""
    hosts = "".join(f"gpu{n:04} slots=8\n" for n in range(1, 1001))
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (512, 1024))
    done = run(hosts, *QUICK, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (2, "")
    line = error_of(done)
    assert "ssh to 1000 hosts needs 3" in line
    assert "may have 1024: raise the limit (ulimit -Hn " in line
    assert "srun, mpirun or clush" in line


def test_two_hundred_hosts_that_are_away_are_one_finding_on_one_screen(run: Run) -> None:
    done = run("".join(f"gpu{n:03} slots=8\n" for n in range(1, 201)), *QUICK, "--timeout", "60")
    assert done.returncode == 1
    assert "where gpu[001-200]\n" in done.stdout
    assert done.stdout.count("Connection refused") == 1
    assert len(done.stdout.splitlines()) < 24


def test_what_a_host_knows_at_once_is_said_here_at_once(run: Run, tmp_path: Path) -> None:
    nic = {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": "nosuch0"}
    done = run("good slots=1\n", "--backend", "gloo", "--select", "interfaces", env=nic)
    told = [line for line in done.stderr.splitlines() if "so far: interface-missing" in line]
    assert len(told) == 1, done
    assert told[0].startswith("nccl-doctor: so far: ")
    assert "interface-missing" in done.stdout


@pytest.mark.parametrize("host", ["good", "noisy", pytest.param("slow", marks=pytest.mark.wide)])
def test_one_host(run: Run, tmp_path: Path, host: str):
    done = run(f"{host} slots=2\n", *QUICK, "--json", "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    validate(data)
    assert (done.returncode, data["verdict"]) == (0, "pass"), done
    assert "2 ranks on 1 host" in done.stdout.splitlines()[0]
    assert done.stderr == ""
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["run"]["hostfile"] == "hosts"
    assert data["run"]["command"].startswith("nccl-doctor run --hostfile hosts")
    assert data["run"]["options"]["outputs"] == {"json": "report.json"}
    log = (tmp_path / "log").read_text()
    assert f"-- {host} exec env " in log
    assert " PYTHONPATH= " in log
    assert f" {quick_python_path()} -c 'exec(" in log, "see tests/unit/test_ssh_program.py"
    assert " run --relay --nnodes 1 --node-rank 0 " in log


def test_a_folder_where_everybody_may_write(
    tmp_path: Path, env: dict[str, str], planted: None
) -> None:
    """Here the program is started as its script starts it: `python -m` has Python's own rule."""
    (tmp_path / "hosts").write_text("good slots=1\n")
    script = "import sys; del sys.path[0]; from nccl_doctor.__main__ import main; main()"
    words = ["run", "--hostfile", "hosts", "--master-port", str(free_port()), *QUICK]
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--json", "-"],
        cwd=tmp_path,
        env={**CLEAN, **env},
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["verdict"] == "pass", done


def test_json_on_stdout_is_nothing_but_json(run: Run):
    done = run("noisy slots=1", *QUICK, "--json", "-")
    assert done.returncode == 0, done
    validate(json.loads(done.stdout))


def test_a_host_that_is_away_is_the_cause_and_does_not_take_the_join_time(run: Run):
    started = time.monotonic()
    done = run("good slots=1\naway slots=1", *QUICK, "--json", "-", "--join-timeout", "55")
    data = json.loads(done.stdout)
    assert (done.returncode, data["verdict"]) == (1, "fail")
    (root,) = data["root_causes"]
    assert (root["code"], root["where"]["hosts"]) == ("ssh-failed", ["away"])
    absent = next(found for found in data["findings"] if found["code"] == "host-absent")
    assert absent["explained_by"] == "ssh-failed"
    assert absent["where"]["nodes"] == [1]
    assert "within 55 s" not in absent["message"]
    assert time.monotonic() - started < 30


def test_nobody_can_be_reached(run: Run):
    done = run("away slots=1\nother slots=1", *QUICK)
    assert done.returncode == 1
    assert "ssh-failed" in done.stdout
    assert "remote-command-failed" in done.stdout
    assert "exit 127: bash: line 1: exec: env: not found" in done.stdout


def test_a_log_in_that_hangs_ends_in_time(run: Run):
    started = time.monotonic()
    done = run("stuck slots=1", *QUICK[:4], "--timeout", "4", "--json", "-")
    assert time.monotonic() - started < 8
    (root,) = json.loads(done.stdout)["root_causes"]
    assert (root["code"], root["where"]["hosts"]) == ("remote-command-failed", ["stuck"])
    assert done.returncode == 1


def test_a_configuration_that_only_the_other_host_has(run: Run, tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "nccl-doctor.toml").write_text("timout = 1\n")
    (tmp_path / "bin" / "ssh").write_text(
        SSH.replace('"$*"', f'"$(printf %s "$*" | sed \'s| {tmp_path} | {there} |\')"')
    )
    done = run("good slots=1", *QUICK, "--json", "-")
    (root,) = json.loads(done.stdout)["root_causes"]
    assert root["code"] == "config-bad-value", done
    assert 'nccl-doctor.toml: unknown key "timout"' in root["message"]


def test_the_environment_that_deepspeed_would_export_is_judged(run: Run, tmp_path: Path):
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\n")
    env = {"NCCL_SOCKET_IFNAME": "zzz0", "NCCL_SECRET": "s3cret", "TORCH_NCCL_X": "1"}
    done = run("good slots=1", *QUICK, "--json", "-", env=env)
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["env"]["NCCL_SOCKET_IFNAME"] == "zzz0"
    assert rank["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "s3cret" not in (tmp_path / "log").read_text(), "whoever lists processes would see it"


def test_the_port_of_ssh_in_the_line_of_the_job_is_used(tmp_path: Path, env: dict[str, str]):
    (tmp_path / "hosts").write_text("away slots=1\naway2 slots=1\n")
    tools = tmp_path / "bin"
    (tools / "deepspeed").write_text("#!/bin/sh\nexit 9\n")
    (tools / "deepspeed").chmod(0o755)
    (tools / "ssh").write_text(SSH.replace("away)", "away*)"))
    line = ("deepspeed", "--hostfile", "hosts", "--ssh_port", "2222", "train.py")
    done = program("run", *QUICK, "--", *line, cwd=tmp_path, env=env)
    assert done.returncode == 1, done
    assert (tmp_path / "log").read_text().count("-p 2222 --") == 2


@pytest.mark.wide
def test_ctrl_c_ends_all_and_still_reports(tmp_path: Path, env: dict[str, str]):
    (tmp_path / "hosts").write_text("good slots=1\nstuck slots=1\n")
    with subprocess.Popen(
        [sys.executable, "-m", "nccl_doctor", "run", "--hostfile", "hosts", *QUICK],
        cwd=tmp_path,
        env={**CLEAN, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: "relay" in str(_with(str(tmp_path))))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 3, (out, err)
    assert " s by SIGINT" in out, err
    assert "Traceback" not in err


@pytest.mark.wide
def test_no_orphan_when_it_is_killed(tmp_path: Path, env: dict[str, str]):
    (tmp_path / "hosts").write_text("good slots=2\nslow slots=2\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "nccl_doctor", "run", "--hostfile", "hosts", *QUICK],
        cwd=tmp_path,
        env={**CLEAN, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: "relay" in str(_with(str(tmp_path))))
    process.kill()
    process.wait()  # the fixture looks whether the others go


# --- bad input: one line, exit 2, nothing started ---

BAD = {
    "--nnodes 3": "--nnodes 3: --hostfile hosts names 2 hosts; leave the option out",
    "--node-rank 0": "--node-rank 0: with --hostfile the line of a host is its node rank",
    "--nproc-per-node 4": 'line 1: "nd0" has slots=2, fewer than --nproc-per-node 4',
    "--json no/such.json": "the folder no does not exist",
    "--select zzz": 'no check or finding code is named "zzz"',
    "--select ssh-failed": '"ssh-failed" is a code of the engine and cannot be selected',
}


@pytest.mark.parametrize("options", BAD)
def test_contradictions(run: Run, tmp_path: Path, options: str):
    assert BAD[options] in error_of(run("nd0 slots=2\nnd1 slots=2\n", *options.split()))
    log = tmp_path / "log"
    assert not log.exists() or log.read_text().split()[0] == "-G", "nothing was started"


def test_bad_files(run: Run, tmp_path: Path):
    assert 'hosts: line 2: "nd1 slots=0": slots' in error_of(run("nd0 slots=1\nnd1 slots=0\n"))
    assert "hosts: names no host" in error_of(run("# none\n"))
    words = error_of(program("run", "--hostfile", "none", cwd=tmp_path))
    assert words == "--hostfile none: cannot be read: No such file or directory"
    (tmp_path / ".deepspeed_env").write_text("A=1\n\n")
    assert ".deepspeed_env, line 2" in error_of(run("nd0 slots=1"))
    (tmp_path / ".deepspeed_env").write_text(f"A={'x' * 100_000}\n")
    assert "larger than 30 KiB" in error_of(run("nd0 slots=1"))
    assert not (tmp_path / "log").exists(), "nothing was started"


def test_under_a_launcher(run: Run):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nd0", "MASTER_PORT": "29500"}
    words = error_of(run("nd0 slots=1", env={**ranks, "LOCAL_RANK": "0"}))
    assert "has started this process as one of its ranks" in words


def test_without_ssh(run: Run, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    words = error_of(run("nd0 slots=1", env={"PATH": str(tmp_path / "empty")}))
    assert words == "--hostfile needs ssh, and ssh is not in PATH: install it"


def test_the_configuration_file_may_name_the_hosts(tmp_path: Path, env: dict[str, str]):
    (tmp_path / "nccl-doctor.toml").write_text('hostfile = "hosts"\nstrict = true\n')
    words = error_of(program("run", cwd=tmp_path, env=env))
    assert words == "--hostfile hosts: cannot be read: No such file or directory"
    # The other host sees the same file, and does not start the same again.
    (tmp_path / "hosts").write_text("good slots=1\n")
    done = subprocess.run(
        [quick_python_path(), "-m", "nccl_doctor", "run", *QUICK, "--json", "-"],
        cwd=tmp_path,
        env={**CLEAN, **env},
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["verdict"] == "pass", done
    assert (tmp_path / "log").read_text().count("--relay") == 1


# --- the other end ---


def relay(tmp_path: Path, env: dict[str, str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [quick_python_path(), "-m", "nccl_doctor", "run", "--relay", *options],
        cwd=tmp_path,
        env={**CLEAN, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


INSTRUCTIONS = instructions(
    Options(backend="gloo", select=("ranks",), join_timeout_s=5), {"NCCL_X": "a"}
)


def test_a_relay_says_its_own_view_where_it_never_got_in(tmp_path: Path, env: dict[str, str]):
    options = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1")
    with relay(tmp_path, env, *options, "--master-port", "9", "--nproc-per-node", "2") as process:
        assert process.stdin is not None
        process.stdin.write(INSTRUCTIONS)
        process.stdin.flush()
        out, err = _read(process)
    data = json.loads(out)
    validate(data)
    assert data["run"]["complete"] is False
    assert "coordinator-lost" in {found["code"] for found in data["findings"]}
    assert process.returncode == data["exit_code"]
    assert err.startswith(MARKER)
    assert {rank["env"]["NCCL_X"] for rank in data["ranks"]} == {"(set)"}, "it was exported"


def test_a_relay_ends_when_the_line_closes(tmp_path: Path, env: dict[str, str]):
    with relay(tmp_path, env) as process:
        out, err = process.communicate("", timeout=20)
    assert process.returncode == 130
    assert out == ""
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29555")
    with relay(tmp_path, env, *options) as process:
        started = time.monotonic()
        out, err = process.communicate(INSTRUCTIONS.replace("5.0", "50.0"), timeout=20)
    assert time.monotonic() - started < 15
    assert process.returncode != 0
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["hello\n", "{}\n", '{"options": {"level": "deep"}}\n', "[]\n"])
def test_a_batch_of_another_version(tmp_path: Path, env: dict[str, str], text: str):
    with relay(tmp_path, env) as process:
        _, err = process.communicate(text, timeout=20)
    assert process.returncode == 2
    assert "nccl-doctor: error: --relay: cannot read the options" in err


def test_a_batch_with_a_check_that_is_not_here(tmp_path: Path, env: dict[str, str]):
    with relay(tmp_path, env) as process:
        assert process.stdin is not None
        process.stdin.write(instructions(Options(select=("zzz",)), {}))
        process.stdin.flush()
        _, err = _read(process)
    assert process.returncode == 2
    assert 'nccl-doctor: error: --select: no check or finding code is named "zzz"' in err


def _read(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Both streams to their end, with standard input left open."""
    assert process.stdout is not None
    assert process.stderr is not None
    out = process.stdout.read()
    err = process.stderr.read()
    process.wait(20)
    return out, err
