"""GDRCopy that is asked for, on made-up hosts with its driver and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Severity, Skip
from nccl_doctor.checks.gdrcopy import GdrCopy
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = GdrCopy()
ASKED = {"NCCL_GDRCOPY_ENABLE": "1"}


def look(root: Path, **env: str) -> dict[str, Any]:
    return observe(GdrCopy, {**ASKED, **env}, backend="nccl", root=root)


def host(root: Path, *, device: bool = True, module: bool = True, **env: str) -> dict[str, Any]:
    fabrics.add_gpus(root, modules=("gdrdrv",) if module else ())
    if device:
        fabrics.write(root, "dev/gdrdrv", "")
    return look(root, **env)


def cluster(*hosts: dict[str, Any], nccl: str | None = "2.28.9") -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    made = make_cluster(names, check="gdrcopy", by_host=seen, backend="nccl")
    loaded = {"loaded": {"version": nccl}, "built": nccl, "cuda": "13.0"}
    facts = {"nccl_library": {ALONE: outcome(loaded)}} if nccl else {}
    return replace(made, ranks=tuple(replace(rank, facts=facts) for rank in made.ranks))


def test_hosts_with_the_driver_are_fine(tmp_path: Path) -> None:
    fine = host(tmp_path)
    assert (fine["device"], fine["opens"], fine["module"]) == (True, True, True)
    assert judge(CHECK, cluster(fine, fine)) == []


def test_the_host_without_the_driver_is_named_and_no_other(tmp_path: Path) -> None:
    fine, bare = host(tmp_path / "a"), host(tmp_path / "b", device=False, module=False)
    found = only(CHECK, cluster(fine, bare, fine), "gdrcopy-missing", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message == (
        "NCCL_GDRCOPY_ENABLE=1 (by environment), but /dev/gdrdrv is not here, and the module "
        "gdrdrv is not loaded"
    )
    assert "modprobe gdrdrv" in (found.fix or found.kind.fix)


def test_a_container_without_the_device(tmp_path: Path) -> None:
    """/proc/modules shows the modules of the machine."""
    found = only(CHECK, cluster(host(tmp_path, device=False)), "gdrcopy-missing", hosts=["nd0"])
    assert "though the module gdrdrv is loaded" in found.message
    assert found.fix.startswith("# docker run --device /dev/gdrdrv")


def test_a_device_that_this_user_may_not_open(tmp_path: Path) -> None:
    shut = {**host(tmp_path), "opens": False}
    found = only(CHECK, cluster(shut), "gdrcopy-missing", hosts=["nd0"])
    assert "may not be opened" in found.message
    assert "chmod 0666 /dev/gdrdrv" in found.fix
    assert found.kind.title.endswith("this process cannot open its device")


def test_modules_that_cannot_be_read_are_not_said_to_be_missing(tmp_path: Path) -> None:
    fabrics.add_gpus(tmp_path)
    (tmp_path / "proc/modules").unlink()
    found = only(CHECK, cluster(look(tmp_path)), "gdrcopy-missing", hosts=["nd0"])
    assert found.message.endswith("but /dev/gdrdrv is not here")


def test_nccl_s_own_way_needs_no_driver(tmp_path: Path) -> None:
    own = host(tmp_path, device=False, module=False, NCCL_GDRCOPY_USE_INTERNAL_DMABUF="2")
    assert judge(CHECK, cluster(own, nccl="2.31.2")) == []
    assert judge(CHECK, cluster(own, nccl=None)) == []
    only(CHECK, cluster(own, nccl="2.30.7"), "gdrcopy-missing", hosts=["nd0"])


def test_a_configuration_file_counts(tmp_path: Path) -> None:
    fabrics.add_gpus(tmp_path)
    fabrics.write(tmp_path, "etc/nccl.conf", "NCCL_GDRCOPY_ENABLE=1")
    seen = observe(GdrCopy, {"HOME": str(tmp_path)}, backend="nccl", root=tmp_path)
    assert seen["asked"] == f"NCCL_GDRCOPY_ENABLE=1 (by {tmp_path}/etc/nccl.conf)"


@pytest.mark.parametrize("env", [{}, {"NCCL_GDRCOPY_ENABLE": "0"}, {"NCCL_GDRCOPY_ENABLE": ""}])
def test_where_nobody_asks_it_is_skipped(tmp_path: Path, env: dict[str, str]) -> None:
    fabrics.add_gpus(tmp_path)
    with pytest.raises(Skip, match="NCCL_GDRCOPY_ENABLE is not 1"):
        observe(GdrCopy, env, backend="nccl", root=tmp_path)


def test_without_gpus_or_nccl_it_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU"):
        look(tmp_path)
    with pytest.raises(Skip, match="does not use NCCL"):
        observe(GdrCopy, ASKED, root=tmp_path)
