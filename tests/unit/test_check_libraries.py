"""The rules of the check `libraries`, on made-up clusters, and one look at made-up libraries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Severity
from nccl_doctor.report.lines import is_table
from nccl_doctor.toolkit.libraries import COLUMNS as LIBRARY_COLUMNS
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.forked_code import run_code
from tests.support.libraries import compiled

pytestmark = pytest.mark.xdist_group("torch")

CHECK = CHECKS["libraries"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)

CUDNN = "nvidia-cudnn-cu12 9.10.2.21"
CUDART = "nvidia-cuda-runtime-cu12 12.8.90"


def row(
    library: str, version: str | None, wheel: str | None, by: str = "wheel", path: str = ""
) -> list[Any]:
    return [library, version, path or f"/venv/{library}.so", by, wheel, 5000, "aa"]


def facts(*rows: list[Any], torch: str = "2.9.0 12.8", shared: Any = ()) -> dict[str, Any]:
    table = {"columns": list(LIBRARY_COLUMNS), "rows": list(rows)}
    return {"torch": torch, "loaded": table, "shared": list(shared)}


NCCL = row("libnccl", "2.27.5", "nvidia-nccl-cu12 2.27.5")
FINE = facts(NCCL, row("libcudart", "12.8", CUDART), row("libcudnn", "9.10.2", CUDNN))
SYSTEM = "/usr/lib/libcudnn.so.9"


def replaced(version: str, by: str = "system") -> dict[str, Any]:
    return facts(
        NCCL, row("libcudart", "12.8", CUDART), row("libcudnn", version, CUDNN, by, SYSTEM)
    )


def cluster_of(*seen: Mapping[str, Any], backend: str = "nccl") -> Cluster:
    by_rank = dict(enumerate(json.loads(json.dumps(seen))))
    hosts = [f"nd{node}" for node in range(len(seen))]
    return make_cluster(hosts, 1, check=CHECK.name, by_rank=by_rank, backend=backend)


def test_the_libraries_of_the_wheels() -> None:
    assert judge(cluster_of(FINE, FINE, FINE)) == []
    # In an image without wheels the libraries of the system are the right ones.
    image = facts(row("libcudnn", "9.10.2", None, "system"), row("libcudart", None, None, "system"))
    assert judge(cluster_of(image, image, image)) == []
    assert is_table(FINE["loaded"])


class TestReplaced:
    def test_on_one_host(self) -> None:
        bad = replaced("9.12.0", f"LD_LIBRARY_PATH={SYSTEM}")
        found = only(cluster_of(FINE, bad, FINE), "cuda-library-replaced", hosts=["nd1"], ranks=[1])
        assert found.level is Severity.WARN
        assert found.fix == "take /usr/lib out of LD_LIBRARY_PATH"
        assert found.message == (
            f"libcudnn 9.12.0 is {SYSTEM}, by LD_LIBRARY_PATH={SYSTEM}; pip lists {CUDNN}"
        )
        found = only(cluster_of(FINE, replaced("9.12.0"), FINE), "cuda-library-replaced",
                     hosts=["nd1"], ranks=[1])  # fmt: skip
        assert found.fix.startswith("LD_DEBUG=libs")  # no variable has put it there

    def test_everywhere_and_newer_is_meant(self) -> None:
        found = judge(cluster_of(*[replaced("9.12.0")] * 3))
        assert {(f.code, f.level) for f in found} == {("cuda-library-replaced", Severity.INFO)}

    def test_everywhere_and_older_is_not(self) -> None:
        found = judge(cluster_of(*[replaced("9.1.0", "LD_PRELOAD=x")] * 3))
        assert {(f.code, f.level, f.fix) for f in found} == {
            ("cuda-library-replaced", Severity.WARN, "unset LD_PRELOAD")
        }

    def test_nccl_is_left_to_its_own_check(self) -> None:
        bad = facts(row("libnccl", "2.18.3", "nvidia-nccl-cu12 2.27.5", "system"))
        good = facts(NCCL)
        assert judge(cluster_of(good, bad, good)) == []


class TestCollide:
    def test_two_wheels_own_a_file(self) -> None:
        names = [["nvidia-cudnn-cu12", "9.10.2.21"], ["nvidia-cudnn-cu13", "9.13.0.50"]]
        both = {**FINE, "shared": [{"file": "/venv/libcudnn.so.9", "wheels": names}]}
        found = only(cluster_of(FINE, FINE, both), "cuda-wheels-collide", hosts=["nd2"], ranks=[2])
        assert found.fix.startswith("pip uninstall -y nvidia-cudnn-cu12 nvidia-cudnn-cu13")
        assert "own one file, /venv/libcudnn.so.9" in found.message

    def test_of_nccl_another_check_speaks(self) -> None:
        names = [["nvidia-nccl-cu12", "2.27.5"], ["nvidia-nccl-cu13", "2.28.9"]]
        both = {**FINE, "shared": [{"file": "/venv/libnccl.so.2", "wheels": names}]}
        assert judge(cluster_of(both, both)) == []

    def test_a_file_of_another_version_than_its_wheel(self) -> None:
        bad = facts(NCCL, row("libcudart", "12.8", CUDART), row("libcudnn", "9.13.0", CUDNN))
        found = judge(cluster_of(bad, bad, bad))
        assert {f.code for f in found} == {"cuda-wheels-collide"}
        assert found[0].fix == "pip install --force-reinstall nvidia-cudnn-cu12==9.10.2.21"
        assert "of another version than pip lists" in found[0].kind.title

    def test_what_torch_brings_itself_has_versions_of_its_own(self) -> None:
        rocm = facts(row("libamdhip64", "6", "torch 2.9.0"), torch="2.9.0 6.4")
        assert judge(cluster_of(rocm, rocm)) == []


def test_two_copies_in_one_process() -> None:
    second = row("libnccl", "2.18.3", None, "LD_PRELOAD=/opt/libnccl.so.2", "/opt/libnccl.so.2")
    twice = facts(*FINE["loaded"]["rows"], second)
    found = only(cluster_of(FINE, twice, FINE), "library-loaded-twice", hosts=["nd1"], ranks=[1])
    assert found.level is Severity.WARN
    assert "libnccl: /venv/libnccl.so (2.27.5, nvidia-nccl-cu12 2.27.5) and /opt" in found.message


class TestDiffers:
    OTHER = facts(
        NCCL,
        row("libcudart", "12.8", CUDART),
        row("libcudnn", "9.8.0", "nvidia-cudnn-cu12 9.8.0.87"),
    )

    def test_the_fewer_are_named(self) -> None:
        cluster = cluster_of(FINE, FINE, self.OTHER)
        found = only(cluster, "library-differs", hosts=["nd2"], ranks=[2])
        assert found.message == "libcudnn 9.8.0; the others have libcudnn 9.10.2"
        assert found.level is Severity.WARN

    def test_a_tie_names_both(self) -> None:
        found = only(
            cluster_of(FINE, self.OTHER), "library-differs", hosts=["nd0", "nd1"], ranks=[0, 1]
        )
        assert found.message == "a tie, by rank: libcudnn 9.10.2 on 0, 9.8.0 on 1"

    def test_another_build_of_the_same_version_is_mentioned(self) -> None:
        mine = [*NCCL[:-1], "bb"]
        other = facts(mine, row("libcudart", "12.8", CUDART), row("libcudnn", "9.10.2", CUDNN))
        found = only(cluster_of(FINE, FINE, other), "library-differs", hosts=["nd2"], ranks=[2])
        assert found.level is Severity.INFO
        assert found.message == "libnccl 2.27.5: 2 different builds, by fingerprint"
        assert found.evidence["builds"] == {"aa": "0–1", "bb": "2"}

    def test_with_another_torch_it_is_no_news(self) -> None:
        other = {**self.OTHER, "torch": "2.8.0 12.8"}
        assert judge(cluster_of(FINE, FINE, other)) == []

    def test_what_does_not_say_its_version_is_not_compared(self) -> None:
        silent = facts(NCCL, row("libcudart", "12.8", CUDART), row("libcudnn", None, CUDNN))
        assert judge(cluster_of(FINE, FINE, silent)) == []


LOOK = """
import ctypes, json, os, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path)
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.libraries import Libraries
steps = []
ctx = Context(launch=Launch(), env=dict(os.environ), breadcrumb=steps.append)
print(json.dumps([Libraries().observe(ctx), steps]))
"""


def look(folder: Path, *paths: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Observe in a process of its own, which has nothing mapped of other tests."""
    return run_code(LOOK, folder, *paths, env=env, timeout_s=CHECK.deadline_s)


def test_observe_on_this_machine(tmp_path: Path) -> None:
    import torch

    done = look(tmp_path)
    if torch.version.cuda is None and torch.version.hip is None:
        assert "Skip: no library of CUDA, ROCm or NCCL is loaded here" in done.stderr
    else:
        assert json.loads(done.stdout)[0]["loaded"]["rows"], done.stderr


def test_libraries_that_are_really_mapped(tmp_path: Path) -> None:
    cudart = "int cudaRuntimeGetVersion(int *v) { *v = 12080; return 0; }"
    nccl = "int ncclGetVersion(int *v) { *v = 22703; return 0; }"
    (tmp_path / "other").mkdir()
    paths = [
        str(compiled(tmp_path / "libcudart.so.12", cudart)),
        str(compiled(tmp_path / "libnccl.so.2", nccl)),
        str(compiled(tmp_path / "other/libnccl.so.2", nccl)),
    ]
    done = look(tmp_path, *paths, LD_LIBRARY_PATH=str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    seen, steps = json.loads(done.stdout)
    rows = {
        row[2]: dict(zip(seen["loaded"]["columns"], row, strict=True))
        for row in seen["loaded"]["rows"]
    }
    assert set(paths) <= set(rows)
    assert [rows[path]["version"] for path in paths] == ["12.8", "2.27.3", "2.27.3"]
    assert rows[paths[2]]["from"] == f"LD_LIBRARY_PATH={tmp_path / 'other'}"
    assert steps[0] == "import torch"
    assert f"version of {paths[0]}" in steps
    found = judge(make_cluster(("nd0",), 1, check=CHECK.name, by_rank={0: seen}))
    assert "library-loaded-twice" in {f.code for f in found}
