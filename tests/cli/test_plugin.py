"""The third-party plug-in of docs/examples: installed as a user would, and run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import program

pytestmark = pytest.mark.xdist_group("plugin")  # installed once

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/nccl-doctor-hello"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the plug-in is installed; it is built from a copy, to leave no traces."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    command += ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run(command, check=True, timeout=120)
    return folder / "site"


def doctor(site: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(site), "COLUMNS": "200", **env}
    return program(*arguments, env=variables, timeout_s=100.0)


def test_the_plug_in_is_listed_with_the_built_in_checks(site: Path) -> None:
    done = doctor(site, "checks")
    assert done.returncode == 0, done.stderr
    for name in ("backend_device", "dataset_folder", "dataset-missing"):
        assert name in done.stdout


def test_its_page_is_explained(site: Path) -> None:
    done = doctor(site, "explain", "dataset-missing")
    assert done.returncode == 0, done.stderr
    assert "DATASET_DIR" in done.stdout


@pytest.mark.parametrize(("exists", "codes"), [(True, []), (False, ["dataset-missing"])])
def test_it_examines_this_host(site: Path, tmp_path: Path, exists: bool, codes: list[str]) -> None:
    folder = tmp_path / "data"
    if exists:
        folder.mkdir()
    report = tmp_path / "report.json"
    done = doctor(
        site, "run", "--select", "dataset_folder", "--backend", "gloo", "--json", str(report),
        DATASET_DIR=str(folder),
    )  # fmt: skip
    assert done.returncode == len(codes), done.stdout + done.stderr
    read = json.loads(report.read_text())
    assert [finding["code"] for finding in read["root_causes"]] == codes
    (check,) = [check for check in read["checks"] if check["name"] == "dataset_folder"]
    assert check["status"] == ("fail" if codes else "pass")
