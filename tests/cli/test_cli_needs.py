"""What the job needs besides its hosts, as a user types it: `--path`, `--endpoint` and others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import error_of, program
from tests.ranks.ranks import free_port

ALONE = ("run", "--nproc-per-node", "1", "--quiet")


def test_what_is_no_path_is_a_usage_error(tmp_path: Path) -> None:
    for value in ("", ":ro", "a\nb"):
        line = error_of(program("run", f"--path={value}"))
        assert f"'--path': {value!r} is not a path" in line
    (tmp_path / "nccl-doctor.toml").write_text('paths = "/ckpt"\n')
    line = error_of(program("run", cwd=tmp_path))
    assert "paths is '/ckpt', not a list of strings" in line


def test_paths_of_the_command_line_and_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "nccl-doctor.toml").write_text('paths = ["there:ro", "none"]\n')
    report = tmp_path / "report.json"
    done = program(*ALONE, "--select=paths", "--json", str(report), cwd=tmp_path)
    assert done.returncode == 1, done
    told = json.loads(report.read_text())
    (found,) = told["findings"]
    assert (found["code"], found["message"].split(":")[0]) == ("path-missing", f"{tmp_path}/none")
    done = program(*ALONE, "--select=paths", "--path", "there", "--json", str(report), cwd=tmp_path)
    assert done.returncode == 0, done
    told = json.loads(report.read_text())
    assert told["run"]["options"]["job"]["paths"] == [[f"{tmp_path}/there", True]]
    assert not list((tmp_path / "there").iterdir())


def test_what_is_no_endpoint_is_a_usage_error() -> None:
    line = error_of(program("run", "--endpoint=head:http"))
    assert "'--endpoint': 'head:http': the port is not a whole number from 1 to 65535" in line


def test_what_is_no_url_is_a_usage_error_that_tells_no_secret(tmp_path: Path) -> None:
    for value in ("hub", "ftp://hub", "tcp://hub", "https://", "https://hub:port", "http://hub:0"):
        line = error_of(program("run", f"--reach={value}"))
        assert f"'--reach': {value!r} is not http://HOST" in line
    line = error_of(program("run", "--reach=ftp://me:hidden@hub"))
    assert "hidden" not in line
    report = tmp_path / "report.json"
    url = "http://me:hidden@127.0.0.1:1/path?token=hidden"
    done = program(*ALONE, "--select=reach", "--reach", url, "--json", str(report), cwd=tmp_path)
    text = report.read_text()
    assert done.returncode == 1, done
    assert "hidden" not in text + done.stdout + done.stderr
    assert json.loads(text)["run"]["options"]["job"]["reach"] == ["http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/shared/init", "is not file:///PATH, tcp://HOST:PORT or env://"),
        ("file://shared/init", "write file:///shared/init with the whole path"),
        ("file:///shared/", "names no file"),
        ("tcp://head", "'head' is not HOST:PORT"),
    ],
)
def test_what_is_no_init_method_is_a_usage_error(value: str, words: str) -> None:
    assert words in error_of(program("run", f"--init-method={value}"))


def test_where_to_meet_is_said_once() -> None:
    line = error_of(program("run", "--init-method=tcp://a:1", "--master-addr=b"))
    assert "--init-method tcp://a:1 and --master-addr b contradict each other" in line


def test_an_init_method_with_an_address_stands_for_the_options(tmp_path: Path) -> None:
    port, other, report = free_port(), free_port(), tmp_path / "report.json"
    tcp = f"--init-method=tcp://127.0.0.1:{port}"
    line = (*ALONE, "--select=endpoints,init_method", "--json", str(report))
    done = program(*line, tcp, cwd=tmp_path)
    told = json.loads(report.read_text())
    assert done.returncode == 3, done  # nothing was asked of these checks
    assert told["ranks"][0]["launch"]["master_port"] == port
    assert told["run"]["options"]["job"]["endpoints"] == []
    plain = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    line = tuple(word for word in line if word not in ("--nproc-per-node", "1"))
    done = program(*line, tcp, cwd=tmp_path, env={**plain, "MASTER_PORT": str(port)})
    told = json.loads(report.read_text())
    assert told["run"]["options"]["job"]["endpoints"] == []  # the same place
    done = program(*line, tcp, cwd=tmp_path, env={**plain, "MASTER_PORT": str(other)})
    told = json.loads(report.read_text())
    assert told["run"]["options"]["job"]["endpoints"] == [f"127.0.0.1:{port}"]
