"""Settings of logind on made-up hosts, and jobs inside and outside of a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Severity
from nccl_doctor.checks.removed_ipc import RemovedIpc
from tests.support import fabrics
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = RemovedIpc()
SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
SESSION = "0::/user.slice/user-1000.slice/session-3.scope"
CONF, DROP_IN = "etc/systemd/logind.conf", "etc/systemd/logind.conf.d/90-keep.conf"
YES, NO = "[Login]\nRemoveIPC=yes", "[Login]\nRemoveIPC=no"


def host(
    root: Path,
    files: dict[str, str],
    *,
    cgroup: str = SLURM,
    uid: int = 1000,
    booted: bool = True,
    **env: str,
) -> dict[str, Any]:
    if booted:
        (root / "run/systemd/system").mkdir(parents=True)
    fabrics.write(root, "proc/self/status", f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}")
    fabrics.write(root, "proc/self/cgroup", cgroup)
    for path, text in files.items():
        fabrics.write(root, path, text)
    return observe(RemovedIpc, {"USER": "ada", **env}, root=root)


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="removed_ipc", by_host=seen)


def test_the_host_that_removes_them_is_named_and_no_other(tmp_path: Path) -> None:
    keeps, removes = host(tmp_path / "a", {CONF: NO}), host(tmp_path / "b", {CONF: YES})
    found = only(CHECK, cluster(keeps, removes, keeps), "shm-removed-at-logout", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message == (
        "RemoveIPC=yes in /etc/systemd/logind.conf, and this process runs outside of the user's "
        "sessions"
    )
    assert "RemoveIPC=no" in found.kind.fix


def test_the_default_that_the_file_tells(tmp_path: Path) -> None:
    """Debian and Ubuntu: yes. Red Hat: no."""
    debian = host(tmp_path / "a", {CONF: "[Login]\n#RemoveIPC=yes"})
    red_hat = host(tmp_path / "b", {CONF: "[Login]\n#RemoveIPC=no"})
    only(CHECK, cluster(debian, red_hat), "shm-removed-at-logout", hosts=["nd0"])


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ({CONF: YES, DROP_IN: NO}, ""),
        ({CONF: NO, DROP_IN: YES}, DROP_IN),
        ({CONF: "#RemoveIPC=no", "run/systemd/logind.conf.d/10.conf": YES}, "run/systemd"),
        ({"usr/lib/systemd/logind.conf.d/90-keep.conf": YES, DROP_IN: NO}, ""),
        ({"usr/lib/systemd/logind.conf.d/95-x.conf": YES, DROP_IN: NO}, "usr/lib/systemd"),
        ({CONF: "RemoveIPC = true"}, CONF),
        ({"usr/lib/systemd/logind.conf": "#RemoveIPC=yes"}, "usr/lib/systemd/logind.conf"),
        ({"usr/lib/systemd/logind.conf": YES, CONF: NO}, ""),
        ({CONF: "RemoveIPC="}, ""),
        ({DROP_IN: "#RemoveIPC=yes"}, ""),
        ({CONF: "[Login]"}, ""),
        ({}, ""),
    ],
)
def test_which_file_decides(tmp_path: Path, files: dict[str, str], file: str) -> None:
    """`file`: the beginning of the one that says yes; empty if none does."""
    found = judge(CHECK, cluster(host(tmp_path, files)))
    assert len(found) == bool(file)
    assert all(f" in /{file}" in each.message for each in found)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"cgroup": SESSION}, id="in a session"),
        pytest.param({"cgroup": f"4:memory:/\n1:name=systemd:{SESSION[3:]}"}, id="cgroup v1"),
        pytest.param({"cgroup": "0::/"}, id="a container that sees no group"),
        pytest.param({"uid": 0}, id="root"),
        pytest.param({"uid": 999}, id="a system user"),
        pytest.param({"booted": False}, id="no systemd, as in a container"),
    ],
)
def test_who_loses_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(host(tmp_path, {CONF: YES}, **other))) == []


def test_a_user_who_lingers_loses_nothing(tmp_path: Path) -> None:
    fabrics.write(tmp_path, "var/lib/systemd/linger/ada", "")
    assert judge(CHECK, cluster(host(tmp_path, {CONF: YES}))) == []
    (tmp_path / "run/systemd/system").rmdir()
    somebody = host(tmp_path, {CONF: YES}, USER="bob")
    only(CHECK, cluster(somebody), "shm-removed-at-logout", hosts=["nd0"])


def test_root_of_a_container_is_not_the_user_whom_logind_knows(tmp_path: Path) -> None:
    fabrics.write(tmp_path, "proc/self/uid_map", "0 1000 1\n1 100000 65536")
    assert judge(CHECK, cluster(host(tmp_path, {CONF: YES}))) == []


def test_a_host_without_these_files(tmp_path: Path) -> None:
    seen = observe(RemovedIpc, root=tmp_path)
    assert seen == {"setting": None, "removes": False, "user": False, "session": None}
    assert judge(CHECK, cluster(seen)) == []
