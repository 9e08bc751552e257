"""`--deepspeed-config`: what is wrong with the file, and what is wrong with what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import error_of, program


def run(folder: Path, config: Any, *options: str) -> tuple[int, dict[str, Any]]:
    (folder / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    done = program(
        *("run", "--nproc-per-node", "2", "--backend", "gloo", "--select", "deepspeed_config"),
        *("--deepspeed-config", "ds.json", "--json", "report.json", *options),
        cwd=folder,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    return done.returncode, json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read ds.json: No such file or directory"),
        ("{", "ds.json is not JSON"),
        ('["stage"]', "ds.json is not an object"),
        ('{"stage": 1, "stage": 2}', 'the key "stage" is given twice'),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    line = error_of(program("run", "--deepspeed-config", "ds.json", cwd=tmp_path))
    assert "--deepspeed-config" in line
    assert words in line


def test_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    code, report = run(tmp_path, {"train_batch_size": 7})
    assert code == 1
    (root,) = report["root_causes"]
    assert root["code"] == "batch-does-not-divide"
    assert not any(root["where"].values())
    assert '"train_batch_size": 6' in root["fix"]


def test_a_mesh_takes_ranks_out_of_the_sum(tmp_path: Path) -> None:
    code, report = run(tmp_path, {"train_batch_size": 7}, "--mesh", "dp=1,tp=2")
    assert (code, report["findings"]) == (0, [])


def test_comments_and_a_key_that_is_ignored(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    code, report = run(tmp_path, "{\n  # a comment\n  train_batch_size: 4\n  train_batchsize: 4\n}")
    assert code == 0
    (found,) = report["findings"]
    assert (found["code"], found["severity"]) == ("deepspeed-config-unknown-key", "warn")


def test_without_the_option_the_check_is_skipped(tmp_path: Path) -> None:
    done = program(
        *("run", "--nproc-per-node", "1", "--backend", "gloo", "--json", "report.json"),
        *("--select", "deepspeed_config,torch_import"),
        cwd=tmp_path,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done
    checks = {c["name"]: c for c in json.loads((tmp_path / "report.json").read_text())["checks"]}
    assert checks["deepspeed_config"]["status"] == "skipped"
    assert "--deepspeed-config is not given" in checks["deepspeed_config"]["reason"]
