"""Which processes on a GPU belong to the examination."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nccl_doctor.toolkit.gpu.processes import is_own
from tests.support.rows import each_row


def process(root: Path, pid: int, name: str, words: Sequence[str], *children: int) -> None:
    folder = root / f"proc/{pid}"
    (folder / f"task/{pid}").mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    (folder / "stat").write_text(f"{pid} ({name}) S 1 1")
    (folder / f"task/{pid}/children").write_text("".join(f"{child} " for child in children))


@each_row(
    ("words", "expected"),
    [
        (("python", "-m", "nccl_doctor", "run"), True),
        (("/opt/venv/bin/python", "/opt/venv/bin/nccl-doctor", "run"), True),
        (("python3", "/shared/nccl-doctor.pyz", "run"), True),
        (("numactl", "-N", "0", "nccl-doctor", "run"), True),
        (("python", "train.py"), False),
        (("python", "/home/me/nccl-doctor/train.py"), False),
        ((), False),
    ],
)
def test_the_worker_of_another_rank_waits_for_its_examination(
    words: Sequence[str], expected: bool, tmp_path_factory
) -> None:
    """As eight workers of Ray Train do, each with a CUDA context."""
    root = tmp_path_factory.mktemp("root")
    process(root, 7, "ray::RayTrainWo", ("ray::RayTrainWorker",), 8)
    process(root, 8, "sh", ("sh", "-c", "exec"), 9)
    process(root, 9, "python", words)
    process(root, 70, "ray::RayTrainWo", ("ray::RayTrainWorker",))
    assert is_own(7, root) is expected
    assert not is_own(70, root)
    assert not is_own(71, root)


def test_ours_and_those_above(tmp_path: Path) -> None:
    process(tmp_path, 7, "ncd:probe", ())
    process(tmp_path, os.getpid(), "python", ())
    assert is_own(7, tmp_path)
    assert is_own(os.getpid(), tmp_path)
