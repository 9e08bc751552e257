"""What the job needs besides its hosts, as a user types it: `--path`, `--endpoint`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.program import error_of, program

ALONE = ("run", "--select", "paths", "--nproc-per-node", "1", "--quiet")


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
    done = program(*ALONE, "--json", str(report), cwd=tmp_path)
    assert done.returncode == 1, done
    told = json.loads(report.read_text())
    (found,) = told["findings"]
    assert (found["code"], found["message"].split(":")[0]) == ("path-missing", f"{tmp_path}/none")
    done = program(*ALONE, "--path", "there", "--json", str(report), cwd=tmp_path)
    assert done.returncode == 0, done
    told = json.loads(report.read_text())
    assert told["run"]["options"]["job"]["paths"] == [[f"{tmp_path}/there", True]]
    assert not list((tmp_path / "there").iterdir())


def test_what_is_no_endpoint_is_a_usage_error() -> None:
    line = error_of(program("run", "--endpoint=head:http"))
    assert "'--endpoint': 'head:http': the port is not a whole number from 1 to 65535" in line
