"""The whole program on a machine that the stand-in for NVML describes."""

from __future__ import annotations

from pathlib import Path

from tests.nvml.stand_in import build, h100s, uuid, write
from tests.ranks.ranks import Ranks

LIMIT_S = 60.0


def test_a_lost_gpu_is_the_cause_and_only_it_is_named(tmp_path: Path) -> None:
    library = build(tmp_path)
    machine = h100s()
    machine["6"]["nvmlDeviceGetTemperature.0"] = "!15"
    env = {
        "LD_LIBRARY_PATH": str(library.parent),
        "NVML_STAND_IN": str(write(machine, tmp_path / "machine")),
    }
    options = ("--select", "gpu_state", "--backend", "nccl")
    ranks = Ranks(tmp_path, 2, options, changes={0: env, 1: env})
    ended = ranks.wait(LIMIT_S)
    report = ranks.report()
    assert {each.code for each in ended.values()} == {1}, ended
    (found,) = [found for found in report["findings"] if found["severity"] == "fail"]
    assert (found["code"], found["where"]["devices"]) == ("gpu-lost", [uuid(6)])
    (check,) = [check for check in report["checks"] if check["name"] == "gpu_state"]
    assert check["status"] == "fail"
    assert check["scope"] == "host"
