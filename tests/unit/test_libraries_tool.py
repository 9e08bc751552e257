"""Finding libraries, their versions and where they come from, on made-up files."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from nccl_doctor.toolkit.libraries import (
    COLUMNS,
    Wheel,
    file_version,
    library_name,
    library_row,
    mapped_libraries,
    origin,
    own_version,
    shared_files,
    wheels,
)
from tests.support.libraries import compiled

MAPS = """\
7f00-7f01 r-xp 00000000 00:2a 17 /venv/nvidia/cuda_runtime/lib/libcudart.so.12
7f01-7f02 r--p 00001000 00:2a 17 /venv/nvidia/cuda_runtime/lib/libcudart.so.12
7f02-7f03 r--p 00000000 00:2a 18 /venv/cupy.libs/libcudart-0cb44c7e.so.12
7f03-7f04 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 00:2a 19 /opt/some folder/libcuda.so.580.95.05
7f05-7f06 r-xp 00000000 00:2a 20 [vdso]
7f06-7f07 r-xp 00000000 00:2a 21 /venv/nvidia/cublas/lib/libcublasLt.so.12
rubbish
"""


def test_what_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert mapped_libraries(("libcudart", "libcuda", "libcublas"), maps) == (
        "/venv/nvidia/cuda_runtime/lib/libcudart.so.12",
        "/opt/some folder/libcuda.so.580.95.05",
    )


@pytest.mark.parametrize(
    ("path", "name", "version"),
    [
        ("/a/libnvidia-ml.so.580.95.05", "libnvidia-ml", "580.95.05"),
        ("/a/libcuda.so", "libcuda", None),
        ("/a/libcuda.so.1", "libcuda", "1"),
        ("/a/libcuda.so.x", None, None),
        ("/a/lib", None, None),
        ("", None, None),
    ],
)
def test_names(path: str, name: str | None, version: str | None) -> None:
    assert library_name(path) == name
    assert file_version(path) == version


def test_the_version_is_that_of_the_file_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.535.1.2").touch()
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.535.1.2")
    assert file_version(str(tmp_path / "libcuda.so.1")) == "535.1.2"


CUBLAS = """
int cublas%sGetProperty(int which, int *v) { *v = which == 0 ? 12 : which == 1 ? 8 : 4; return 0; }
"""


@pytest.mark.parametrize(
    ("file", "source", "version"),
    [
        ("libcudart.so.12", "int cudaRuntimeGetVersion(int *v) { *v = 12080; return 0; }", "12.8"),
        ("libcudart.so.12", "int cudaRuntimeGetVersion(int *v) { return 35; }", None),
        ("libcudnn.so.9", "unsigned long cudnnGetVersion(void) { return 91002; }", "9.10.2"),
        ("libcudnn.so.8", "unsigned long cudnnGetVersion(void) { return 8902; }", "8.9.2"),
        ("libcublas.so.12", CUBLAS % "", "12.8.4"),
        ("libcublasLt.so.12", CUBLAS % "Lt", "12.8.4"),
        ("libcublas.so.12", "int cublasGetProperty(int a, int *v) { return 1; }", None),
        ("libcudart.so.12", "int other;", None),
        ("libcudnn.so.9", "int other;", None),
        ("libcublas.so.12", "int other;", None),
        ("libnvshmem_host.so.3", "int other;", "3"),
    ],
)
def test_the_library_is_asked(tmp_path: Path, file: str, source: str, version: str | None) -> None:
    folder = tmp_path / str(zlib.crc32(source.encode()))  # one path is loaded only once
    folder.mkdir()
    assert own_version(str(compiled(folder / file, source))) == version


def installed(site: Path, name: str, version: str, *files: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


CUDNN = "nvidia/cudnn/lib/libcudnn.so.9"


def test_wheels_and_the_files_that_several_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "nvidia/cudnn/lib/libcudnn_ops.so.9"
    installed(tmp_path, "nvidia-cudnn-cu13", "9.13.0.50", CUDNN, other, "nvidia/cudnn.h")
    installed(tmp_path, "nvidia-cudnn-cu12", "9.10.2.21", CUDNN, other)
    installed(tmp_path, "nvidia-cublas-cu12", "12.8.4.1", "nvidia/cublas/lib/libcublas.so.12")
    installed(tmp_path, "numpy", "2.0", "numpy/libfoo.so")
    (tmp_path / "nvidia/cublas/lib/libcublas.so.12").unlink()
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # not the machine's own
    found = wheels(re.compile(r"nvidia-.+"))
    paths = tuple(str(tmp_path / file) for file in (CUDNN, other))
    assert found == [
        Wheel("nvidia-cublas-cu12", "12.8.4.1", ()),
        Wheel("nvidia-cudnn-cu12", "9.10.2.21", paths),
        Wheel("nvidia-cudnn-cu13", "9.13.0.50", paths),
    ]
    owners = [["nvidia-cudnn-cu12", "9.10.2.21"], ["nvidia-cudnn-cu13", "9.13.0.50"]]
    assert shared_files(found) == [{"file": paths[0], "wheels": owners}]


def test_where_a_library_comes_from(tmp_path: Path) -> None:
    own, other = tmp_path / "own/libcudnn.so.9", tmp_path / "other/libcudnn.so.9.1.0"
    for path in (own, other):
        path.parent.mkdir()
        path.write_bytes(b"x" * 10)
    wheel = Wheel("nvidia-cudnn-cu12", "9.10.2.21", (str(own),))
    in_front = {"LD_LIBRARY_PATH": f"/usr/lib:{other.parent}"}
    assert origin(str(own), [wheel], in_front) == ("wheel", "nvidia-cudnn-cu12 9.10.2.21")
    assert origin(str(other), [wheel], in_front) == (
        f"LD_LIBRARY_PATH={other.parent}",
        "nvidia-cudnn-cu12 9.10.2.21",
    )
    assert origin(str(other), [], {"LD_PRELOAD": str(other)}) == (f"LD_PRELOAD={other}", None)
    assert origin(str(other), [], {}) == ("system", None)
    row = dict(zip(COLUMNS, library_row(str(other), file_version, [], {}), strict=True))
    assert (row["library"], row["version"], row["bytes"]) == ("libcudnn", "9.1.0", 10)
    assert len(row["fingerprint"]) == 16


def test_a_file_that_is_gone_is_a_row_without_a_version(tmp_path: Path) -> None:
    path = str(tmp_path / "libcudart.so.12")
    row = dict(zip(COLUMNS, library_row(path, own_version, [], {}), strict=True))
    assert row["path"] == path
    assert [row[name] for name in ("version", "bytes", "fingerprint")] == [None] * 3
