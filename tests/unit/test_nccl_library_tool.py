"""Finding NCCL libraries, on made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.toolkit.libraries import fingerprint, in_front
from nccl_doctor.toolkit.nccl.library import mapped_nccl, nccl_version, nccl_wheels, version_text
from nccl_doctor.toolkit.versions import release
from tests.support.libraries import compiled

MAPS = """\
7f00-7f01 r-xp 00000000 00:2a 17 /opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2
7f01-7f02 r--p 00001000 00:2a 17 /opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r--p 00000000 00:2a 18 /opt/lib/libnccl-net.so
7f03-7f04 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 00:2a 19 /opt/some folder/libnccl.so.2.28.9
7f05-7f06 r-xp 00000000 00:2a 20 [vdso]
"""


def test_what_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert mapped_nccl(maps) == (
        "/opt/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "/opt/some folder/libnccl.so.2.28.9",
    )


@pytest.mark.parametrize(
    ("number", "text"), [(2708, "2.7.8"), (20903, "2.9.3"), (22809, "2.28.9"), (23007, "2.30.7")]
)
def test_version_numbers(number: int, text: str) -> None:
    assert version_text(number) == text


def test_the_library_is_asked(tmp_path: Path) -> None:
    source = "int ncclGetVersion(int *v) { *v = 22703; return 0; }"
    assert nccl_version(str(compiled(tmp_path / "libnccl.so.2", source))) == "2.27.3"


@pytest.mark.parametrize("source", ["int other;", "int ncclGetVersion(int *v) { return 1; }"])
def test_a_library_that_does_not_answer(tmp_path: Path, source: str) -> None:
    assert nccl_version(str(compiled(tmp_path / "libnccl.so.2", source))) is None


def test_no_library(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libnccl\.so\.2"):
        nccl_version(str(tmp_path / "libnccl.so.2"))


def test_builds_of_one_version_are_told_apart(tmp_path: Path) -> None:
    big = b"\x7fELF" + bytes(3 << 20)
    files = []
    for number, data in enumerate((big, big, big[:-1] + b"x", big + b"\0", b"", b"\x7fELF")):
        files.append(tmp_path / f"{number}")
        files[-1].write_bytes(data)
    prints = [fingerprint(str(file)) for file in files]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


def wheel(site: Path, name: str, version: str, *, there: bool = True) -> None:
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\nnvidia/nccl/include/nccl.h,,\n")
    if there:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()


def test_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "nvidia-nccl-cu13", "2.28.9")
    wheel(tmp_path, "nvidia-nccl-cu12", "2.27.3")
    wheel(tmp_path, "nvidia-cublas-cu12", "12.8")
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # not the machine's own
    library = str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    assert nccl_wheels() == [
        {"name": "nvidia-nccl-cu12", "version": "2.27.3", "library": library},
        {"name": "nvidia-nccl-cu13", "version": "2.28.9", "library": library},
    ]


def test_a_wheel_whose_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "nvidia-nccl-cu12", "2.27.3", there=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # not the machine's own
    assert [found["library"] for found in nccl_wheels()] == [None]


def test_what_puts_a_library_in_front(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2.27.3"
    library.touch()
    link = tmp_path / "libnccl.so.2"
    link.symlink_to(library)
    env = {
        "LD_PRELOAD": f"/usr/lib/libjemalloc.so:{link}",
        "LD_LIBRARY_PATH": f"/usr/lib::{tmp_path}/",
    }
    assert list(in_front(env, str(library))) == [
        f"LD_PRELOAD={link}",
        f"LD_LIBRARY_PATH={tmp_path}/",
    ]
    assert list(in_front({"LD_LIBRARY_PATH": "/usr/lib"}, str(library))) == []
    assert list(in_front({}, str(library))) == []


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.26.2.post1", (2, 26, 2)),
        ("2.7.0a0+git", (2, 7, 0)),
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.1", (2, 1)),
        ("", ()),
        (None, ()),
        ("nightly", ()),
    ],
)
def test_releases(version: str | None, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers
