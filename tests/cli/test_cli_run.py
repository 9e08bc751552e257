"""`run` and `env` on this host, as a user starts them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.program import program
from tests.support.reports import validate


def test_run_without_a_launcher_examines_this_host(tmp_path: Path):
    target = tmp_path / "report.json"
    arguments = ("--nproc-per-node", "2", "--backend", "gloo", "--select", "ranks,collectives")
    done = program("run", *arguments, "--json", str(target), cwd=tmp_path, timeout_s=150)
    data = json.loads(target.read_text())
    validate(data)
    assert (done.returncode, data["exit_code"], data["verdict"]) == (0, 0, "pass"), done
    passed = "2 checks passed for 2 ranks on 1 host; the others were not run"
    assert done.stdout.startswith(f"nccl-doctor: PASS: {passed}")
    assert done.stdout.splitlines()[-2].endswith("exit code 0")
    assert done.stdout.splitlines()[-1].startswith("Next: ")
    assert {rank["rank"] for rank in data["ranks"]} == {0, 1}
    for rank in data["ranks"]:
        assert {"examined_s", "connect_s", "seat_s", "load"} <= set(rank["joining"])
    assert data["run"]["options"]["select"] == ["ranks", "collectives"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]

    shown = program("report", "show", str(target))
    assert shown.stdout == done.stdout
    judged = program("report", "judge", str(target), "--json", "-")
    assert judged.returncode == 0, judged
    again = json.loads(judged.stdout)
    for key in ("verdict", "summary", "findings", "checks", "hosts", "ranks"):
        assert again[key] == data[key]


def test_json_on_stdout_is_nothing_but_json(tmp_path: Path):
    arguments = ("--nproc-per-node", "1", "--backend", "gloo", "--select", "ranks", "--json", "-")
    done = program("run", *arguments, cwd=tmp_path, timeout_s=150)
    assert done.returncode == 0, done
    validate(json.loads(done.stdout))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_configuration_of_another_user_is_not_obeyed(tmp_path: Path):
    """Nor does it hide a fault, or have a file written."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    config = tmp_path / "nccl-doctor.toml"
    config.write_text(f"json = '{mine}'\nignore = 'ranks'\nhostfile = 'hosts'\n")
    os.chown(config, 65533, 65533)
    one = ("run", "--nproc-per-node", "1", "--backend", "gloo", "--select", "ranks", "-v")
    done = program(*one, "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done
    left_out, used = done.stderr.splitlines()[:2]
    assert left_out.startswith(f"nccl-doctor: {config} is left out: nccl-doctor.toml belongs to ")
    assert used == "nccl-doctor: configuration: none"
    assert mine.read_text() == "kept"
    assert json.loads((tmp_path / "report.json").read_text())["run"]["options"]["config"] == ""
    config.write_text("strict = true")
    os.chown(config, 0, 0)
    done = program(*one, "--json", "report.json", cwd=tmp_path)
    assert f"nccl-doctor: configuration: {config}" in done.stderr.splitlines()
    options = json.loads((tmp_path / "report.json").read_text())["run"]["options"]
    assert (options["config"], options["strict"]) == (str(config), True)


def test_env_meets_nobody(tmp_path: Path):
    done = program("env", "--select", "ranks,collectives", "--json", "-", cwd=tmp_path)
    data = json.loads(done.stdout)
    validate(data)
    assert done.returncode == data["exit_code"]
    statuses = {check["name"]: check["status"] for check in data["checks"]}
    assert statuses["collectives"] == "skipped"
    assert "fit to train" not in data["summary"]
    assert [host["reported"] for host in data["hosts"]] == [True]


def test_a_report_that_cannot_be_saved_after_all_is_not_a_success(tmp_path: Path):
    saved = tmp_path / "saved.json"
    done = program("env", "--select", "ranks", "--json", str(saved), cwd=tmp_path)
    assert done.returncode == 0, done
    done = program("report", "judge", str(saved), "--json", "/proc/nccl-doctor.json")
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "/proc/nccl-doctor.json" in line


def test_env_prints_the_facts_of_this_host(tmp_path: Path):
    saved = tmp_path / "saved.json"
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    settings = {"NCCL_DEBUG": "INFO", "NCCL_API_KEY": "hidden", "EDITOR": "vi"}
    done = program("env", "--json", str(saved), cwd=tmp_path, env={**job, **settings})
    data = json.loads(saved.read_text())
    validate(data)
    (host,), (rank,) = data["hosts"], data["ranks"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"nccl-doctor: {data['verdict'].upper()}: ")
    words = [line.split() for line in lines]
    assert ["host", host["host"]] in words
    for address in host["addresses"]:
        assert any(line[:1] == ["addresses"] and address in done.stdout for line in words)
    assert ["world_size", "1", "(WORLD_SIZE)"] in words
    assert len(lines) <= 60, "it is no screen any more"
    assert ["torch", rank["facts"]["software"]["alone"]["facts"]["torch"]] in words
    assert ["NCCL_DEBUG", "INFO"] in words
    assert ["NCCL_API_KEY", "(set)"] in words
    assert "EDITOR" not in done.stdout
    assert program("report", "show", str(saved)).stdout == done.stdout
    everything = program("report", "show", "-v", str(saved)).stdout.splitlines()
    assert f"host {host['host']}" in everything
    for library in ("nccl-bootstrap", "nccl-sockets", "gloo"):
        assert any(line.split()[:2] == [f"choices.{library}", "picks"] for line in everything)
    quiet = program("env", "-q", "--select", "software", cwd=tmp_path).stdout
    assert "addresses" not in quiet


def test_env_where_nothing_was_launched_is_content(tmp_path: Path):
    done = program("env", "--select", "master_addr,port,software", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "other hosts were not examined" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("command", [pytest.param("env", marks=pytest.mark.wide), "run"])
def test_a_debug_level_at_which_torch_refuses_to_import_is_found(tmp_path, command):
    done = program(
        *(command, "--backend", "gloo", "--json", "report.json", "--quiet"),
        cwd=tmp_path,
        env={"TORCH_DISTRIBUTED_DEBUG": "YES"},
    )
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    (root,) = json.loads((tmp_path / "report.json").read_text())["root_causes"]
    assert root["code"] == "env-bad-value"
    assert "TORCH_DISTRIBUTED_DEBUG" in root["message"]
