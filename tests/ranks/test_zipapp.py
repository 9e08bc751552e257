"""The one file with real ranks, where torch and nothing else is installed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli_hostfile import SSH
from tests.ranks.ranks import free_port
from tests.support.reports import validate
from tests.support.zipapp import BARE, ROOT, add_torchrun, built, make_venv, run

pytestmark = pytest.mark.xdist_group("zipapp")  # built once
FEW = ("--select", "ranks,torch_import,interfaces")
LINES = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").splitlines()


class Site:
    """A shared folder with the file, and an environment with torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = make_venv(folder / "venv", ["torch"])
        add_torchrun(self.python)
        self.pyz = built(folder / "shared" / "nccl-doctor.pyz")
        self.work = folder / "work"
        self.work.mkdir()

    def type_in(self, line: str, *more: str, path: str = "") -> Any:
        """Run a line of docs/install.md, with more options."""
        assert line in LINES
        line = line.replace("torchrun ", f"torchrun --master-port {free_port()} ")
        env = {
            "PATH": f"{path}{self.python.parent}:{BARE['PATH']}",
            "SHARED": str(self.pyz.parent),
            "HOME": str(self.work),
            "SSH_LOG": str(self.folder / "ssh.log"),
        }
        line = f"{line} {shlex.join(more)}"
        return run("bash", "-c", line, cwd=self.work, env=env, timeout_s=100.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(autouse=True)
def nothing_beside(site: Site):
    yield
    assert list(site.pyz.parent.iterdir()) == [site.pyz]


def report_of(site: Site, done: Any) -> dict[str, Any]:
    data = json.loads((site.work / "report.json").read_text())
    validate(data)
    assert (done.returncode, data["verdict"]) == (0, "pass"), done
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    return data


def test_it_is_alone_with_torch(site: Site) -> None:
    code = (
        "import importlib.util as u; "
        "print([n for n in 'torch click tabulate psutil numpy nccl_doctor'.split() "
        "if u.find_spec(n)])"
    )
    assert run(site.python, "-c", code, cwd=site.work).stdout == "['torch']\n"


def test_under_torchrun_every_check_works(site: Site) -> None:
    line = 'torchrun --nproc-per-node 2 "$SHARED/nccl-doctor.pyz" run'
    data = report_of(site, site.type_in(line, "--json", "report.json"))
    status = {check["name"]: check["status"] for check in data["checks"]}
    assert set(status.values()) <= {"pass", "skipped"}
    assert (status["interfaces"], status["collectives"]) == ("pass", "pass")


@pytest.mark.wide  # a host of a hostfile shows it, too
def test_the_own_launcher(site: Site) -> None:
    line = 'python "$SHARED/nccl-doctor.pyz" run'
    done = site.type_in(line, *FEW, "--json", "report.json", "--master-port", str(free_port()))
    assert report_of(site, done)["run"]["launcher"] == "nccl-doctor"


def test_a_host_of_a_hostfile_is_started_with_the_file(site: Site) -> None:
    ssh = site.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    (site.work / "hosts").write_text("good slots=2\n")
    line = 'python "$SHARED/nccl-doctor.pyz" run --hostfile hosts'
    more = (*FEW, "--json", "report.json", "--master-port", str(free_port()))
    data = report_of(site, site.type_in(line, *more, path=f"{ssh.parent}:"))
    assert data["run"]["launcher"] == "nccl-doctor"
    log = (site.folder / "ssh.log").read_text()
    assert f" {site.python} -c " in log
    assert f" {site.pyz} run --relay --nnodes 1 " in log
