"""A file server that does not answer one host, or any: it is named, or at least not waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nccl_doctor.system.helpers import PATIENCE_S
from tests.lab import faults
from tests.lab.lab import PATIENT, TOTAL_S, Lab
from tests.lab.reading import START_S, check_cause
from tests.support import disks
from tests.support.waiting import until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disks.frozen(tmp_path) as disk:
        yield disk


# The disk first: a host of the lab sees what was mounted when it was made.


@pytest.mark.wide
def test_temporary_files_of_one_host(disk: Path, make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1")
    run = lab.own_doctor(*PATIENT, nproc=2, per_host_env={"nd1": {"TMPDIR": str(disk)}})
    disks.thaw(disk)  # before the lab waits for what is left in it
    found = check_cause(run, run.report, "temp-dir-unwritable", hosts=["nd1"], ranks=[])
    assert found["evidence"]["folder"] == str(disk)
    assert found["evidence"]["state"] == "D"
    assert run.codes == [1, 1], str(run)
    assert run.seconds < START_S + TOTAL_S, str(run)


def test_the_folder_that_hosts_share(disk: Path, make_lab: Callable[..., Lab]) -> None:
    """What is wrong is found all the same, and only the views are lost."""
    lab = make_lab("nd0", "nd1")
    faults.drop_ephemeral(lab["nd0"])
    run = lab.own_doctor(*PATIENT, "--output-dir", str(disk))
    disks.thaw(disk)
    check_cause(
        run, run.report, {"peer-blocked", "peer-one-way"}, hosts=["nd0"], links=[("nd1", "nd0")]
    )
    assert run.codes == [3, 3], str(run)
    for done in run.done:
        assert f"the partial report was not saved: {disk}" in done.stderr, str(run)
    assert len(run.leftovers) == 2, str(run)  # each host has asked once
    assert run.seconds < START_S + TOTAL_S + PATIENCE_S, str(run)


@pytest.mark.wide
def test_the_storage_of_the_job(disk: Path, make_lab: Callable[..., Lab]) -> None:
    """It can be looked at, and keeps everybody who writes; nothing is left once it answers."""
    lab = make_lab("nd0", "nd1")
    run = lab.plain_doctor(*PATIENT, "--level", "quick", "--path", str(disk))
    found = check_cause(run, run.report, "path-hangs", hosts=["nd0", "nd1"], ranks=[])
    assert "writing a file of 4 KiB with fsync did not end within 8 s" in found["message"]
    assert run.codes == [1, 1], str(run)
    assert run.seconds < START_S + TOTAL_S, str(run)
    disks.thaw(disk)
    until(lambda: not list(disk.glob(".nccl-doctor-*")))
