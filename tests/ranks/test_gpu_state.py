"""The whole program on machines that the stand-in for NVML describes: `tests/nvml/machines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvml.stand_in import MACHINES, build, described, h100s, read, uuid, write
from tests.ranks.ranks import Ranks

TIMEOUT_S = 14.0
"""Time limit of the run: a GPU that never answers takes what is left of it."""
SLACK_S = 6.0
OPTIONS = ("--select", "gpu_state", "--backend", "nccl", "--timeout", f"{TIMEOUT_S:g}")


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("nvml")).parent)


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.json")))
def test_what_ails_a_gpu_is_named_and_no_other_is(
    name: str, library_path: str, tmp_path: Path
) -> None:
    machine = str(write(described(name), tmp_path / "machine"))
    env = {"NVML_STAND_IN": machine, "LD_LIBRARY_PATH": library_path}
    ranks = Ranks(tmp_path, 1, OPTIONS, changes={0: env})
    ended = ranks.wait(TIMEOUT_S + SLACK_S)
    report = ranks.report()
    finds = [(code, severity, [uuid(gpu)]) for code, severity, gpu in read(name)["finds"]]
    assert [
        (found["code"], found["severity"], found["where"]["devices"])
        for found in report["findings"]
        if found["severity"] != "info" and found["check"] == "gpu_state"
    ] == finds
    severities = [severity for _, severity, _ in finds]
    assert {each.code for each in ended.values()} == {int("fail" in severities)}, ended
    (check,) = [check for check in report["checks"] if check["name"] == "gpu_state"]
    assert check["status"] == next(iter(severities), "pass")
    assert check["scope"] == "host"
    gpus = report["hosts"][0]["facts"]["gpu_state"]["alone"]["facts"]["gpus"]
    assert [gpu["index"] for gpu in gpus] == list(range(8))  # the others were looked at


def test_it_is_found_by_one_rank_of_the_host(library_path: str, tmp_path: Path) -> None:
    machine = h100s()
    machine["6"]["nvmlDeviceGetTemperature.0"] = "!GPU_IS_LOST"
    file = str(write(machine, tmp_path / "machine"))
    env = {"NVML_STAND_IN": file, "LD_LIBRARY_PATH": library_path}
    ranks = Ranks(tmp_path, 2, OPTIONS, changes={0: env, 1: env})
    ended = ranks.wait(TIMEOUT_S + SLACK_S)
    (found,) = [found for found in ranks.report()["findings"] if found["severity"] == "fail"]
    assert (found["code"], found["where"]["devices"]) == ("gpu-lost", [uuid(6)])
    assert {each.code for each in ended.values()} == {1}, ended
