"""Folders of compilers that several hosts share over a network."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Severity, Skip
from nccl_doctor.checks.compile_caches import CACHES, CompileCaches, path_of
from tests.support.clusters import make_cluster
from tests.support.findings import judge
from tests.support.observing import observe
from tests.support.rows import each_row

CHECK = CompileCaches()


def cache(path: str = "/home/u/.triton/cache", **more: Any) -> dict[str, Any]:
    return {
        "name": "Triton", "variable": "TRITON_CACHE_DIR", "path": path, "real": path,
        "type": "nfs4", "source": "fs1:/home", "options": "rw,local_lock=none", "lock": None,
        **more,
    }  # fmt: skip


def found(*hosts: dict[str, Any] | None) -> list[Any]:
    names = [f"nd{node}" for node in range(len(hosts))]
    facts = {n: {"caches": [each]} for n, each in zip(names, hosts, strict=True) if each}
    return judge(CHECK, make_cluster(names, 1, check=CHECK.name, by_host=facts))


@each_row(
    ("more", "level", "words"),
    [
        ({}, Severity.INFO, "Triton in /home/u/.triton/cache: on nfs4 fs1:/home"),
        ({"lock": ""}, Severity.INFO, "fs1:/home"),
        ({"options": "rw,local_lock=all"}, Severity.WARN, "other hosts: local_lock=all"),
        ({"options": "rw,nolock"}, Severity.WARN, "nolock"),
        ({"type": "lustre", "options": "rw,localflock"}, Severity.WARN, "localflock"),
        ({"lock": "No locks available"}, Severity.WARN, "No locks available"),
    ],
)
def test_hosts_that_compile_into_one_folder(
    more: dict[str, Any], level: Severity, words: str
) -> None:
    (one,) = found(cache(**more), None, cache(**more))
    assert (one.code, one.level) == ("compile-cache-shared", level)
    assert one.where.hosts == ("nd0", "nd2")
    assert words in one.message
    (step,) = one.fix.steps
    line = f'{step.command}; echo "$TRITON_CACHE_DIR"; {step.undo}; echo "[$TRITON_CACHE_DIR]"'
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("/tmp/triton_cache_dir-")
    assert said.stdout.endswith("\n[]\n")


def test_folders_that_are_not_one() -> None:
    assert found(cache(), cache("/home/u/nd1/cache")) == []
    assert found(cache(), cache(source="fs2:/home")) == []
    assert found(cache(), None) == []


@each_row(
    ("env", "expected"),
    [
        ({"HOME": "/h", "USER": "u"},
         ["/h/.triton/cache", "/tmp/torchinductor_u", "/h/.cache/torch_extensions",
          "/h/.cache/tvm-ffi", "/h/.cache/vllm", "/h/.cache/flashinfer"]),
        ({"HOME": "/h", "TRITON_HOME": "/t", "XDG_CACHE_HOME": "/x", "TMPDIR": "/d", "USER": "u"},
         ["/t/.triton/cache", "/d/torchinductor_u", "/x/torch_extensions", "/h/.cache/tvm-ffi",
          "/x/vllm", "/h/.cache/flashinfer"]),
        ({row.variable: "/named" for row in CACHES},
         ["/named"] * 5 + ["/named/.cache/flashinfer"]),
    ],
)  # fmt: skip
def test_where_each_library_looks(env: Mapping[str, str], expected: list[str]) -> None:
    assert [path_of(row, env) for row in CACHES] == expected


def test_what_is_seen_on_a_host(tmp_path: Path) -> None:
    home, table = tmp_path / "home", tmp_path / "proc/self/mounts"
    (home / "cache" / "kernel").mkdir(parents=True)
    (home / "cache" / "kernel" / "k.so").write_bytes(b"x")
    (home / "link").symlink_to(home / "cache")
    table.parent.mkdir(parents=True)
    table.write_text(f"disk / ext4 rw 0 0\nfs1:/home {home} nfs4 rw,nolock 0 0\n")
    env = {"TRITON_CACHE_DIR": str(home / "link"), "HOME": "/h", "TORCH_EXTENSIONS_DIR": "/disk"}
    (seen,) = observe(CompileCaches, env, root=tmp_path)["caches"]
    assert (seen["name"], seen["real"], seen["lock"]) == ("Triton", str(home / "cache"), "")
    assert (seen["type"], seen["source"]) == ("nfs4", "fs1:/home")
    assert "nolock" in seen["options"]
    assert sorted(each.name for each in home.rglob("*")) == ["cache", "k.so", "kernel", "link"]
    with pytest.raises(Skip):
        observe(CompileCaches, {"HOME": "/h"}, root=tmp_path)
