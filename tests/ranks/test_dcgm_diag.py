"""`--with-dcgm` through the whole program, with a stand-in for `dcgmi`."""

from __future__ import annotations

from pathlib import Path

from tests.dcgm.stand_in import dcgmi, diagnosis, printing
from tests.ranks.ranks import Ranks

TIMEOUT_S = 90.0
SLACK_S = 6.0
OPTIONS = ("--select", "dcgm_diag", "--backend", "gloo", "--timeout", f"{TIMEOUT_S:g}")


def run(folder: Path, env: dict[str, str], level: int) -> tuple[dict[str, object], set[int]]:
    """The report, and the exit codes of two ranks of one host."""
    ranks = Ranks(folder, 2, (*OPTIONS, "--with-dcgm", str(level)), changes={0: env, 1: env})
    ended = ranks.wait(TIMEOUT_S + SLACK_S)
    return ranks.report(), {each.code for each in ended.values()}


def test_a_failed_diagnosis_fails_the_run_and_is_made_once_per_host(tmp_path: Path) -> None:
    said = diagnosis(4, ("memory", 3, "Fail", "Found 7 faulty memory elements on GPU 3"))
    report, codes = run(tmp_path, printing(tmp_path / "bin", said, code=1), 1)
    (found,) = report["findings"]
    assert (found["code"], found["where"]["devices"]) == ("gpu-unhealthy", ["GPU 3"])
    assert codes == {1}
    assert (tmp_path / "bin/asked").read_text() == "diag -r 1 -j\n"
    assert report["run"]["job"]["dcgm_level"] == 1


def test_too_little_time_is_unknown_and_says_so(tmp_path: Path) -> None:
    env = dcgmi(tmp_path / "bin", f"touch {tmp_path}/asked")
    report, codes = run(tmp_path, env, 3)
    (check,) = [check for check in report["checks"] if check["name"] == "dcgm_diag"]
    assert check["status"] == "unknown"
    assert "dcgmi diag -r 3 takes 900 s or more, and the run has" in check["reason"]
    assert codes == {3}
    assert not (tmp_path / "asked").exists()
