"""Calls in processes of their own: what one of them does is no other's loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Confidence, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_state.apart import each_apart
from nccl_doctor.checks.gpu_state.gather import gather_gpus
from tests.nvml.stand_in import build, h100s, observe, uuid, write
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.gpu_states import cluster_of, gpu, state

CHECK = GpuState()


def good(crumb: Any) -> int:
    crumb("asking", call="nvmlInit")
    return 7


def bad(crumb: Any) -> int:
    crumb("asking", call="nvmlDeviceGetName")
    raise KeyError("a field that nobody expected")


def killed(crumb: Any) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def slow(crumb: Any) -> int:
    time.sleep(60)
    return 0


def test_each_ends_in_its_own_way() -> None:
    said: list[str] = []
    started = time.monotonic()
    ends = each_apart([good, bad, killed, slow], 1.0, lambda step, **more: said.append(step))
    assert time.monotonic() - started < 4.0
    assert [end.value for end in ends] == [7, None, None, None]
    assert ends[0].how == ends[0].raised == ""
    assert ends[1].how == "KeyError: 'a field that nobody expected'"
    assert "Traceback" in ends[1].raised
    assert ends[1].crumb["call"] == "nvmlDeviceGetName"
    assert ends[2].how == "killed the process, SIGSEGV"
    assert ends[3].how == "did not return within 1 s"
    assert (ends[2].raised, ends[3].raised) == ("", "")
    assert said == ["asking", "asking"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def seen(library: Path, folder: Path, bad: set[int], count: int = 3) -> Outcome:
    """All GPUs, where the bindings fail in a way of their own at some of them."""
    (folder / "dev").mkdir()
    (folder / "dev/kmsg").write_text("")
    uuids = {uuid(index) for index in bad}

    def look(crumb: Any) -> Mapping[str, Any]:
        import pynvml

        real = pynvml.nvmlDeviceGetVbiosVersion

        def vbios(handle: Any) -> Any:
            if pynvml.nvmlDeviceGetUUID(handle) in uuids:
                raise KeyError("no such field")
            return real(handle)

        pynvml.nvmlDeviceGetVbiosVersion = vbios
        return gather_gpus(crumb, folder)

    return observe(library, write(h100s(count), folder / "machine"), look)


def test_a_surprise_at_one_gpu_costs_no_other_its_facts(library: Path, tmp_path: Path) -> None:
    outcome = seen(library, tmp_path, {1})
    assert outcome.status is OutcomeStatus.OK, outcome
    gpus = outcome.facts["gpus"]
    assert gpus[1] == {
        "index": 1,
        "uuid": uuid(1),
        "lost": False,
        "refused": {},
        "raised": {"call": "nvmlDeviceGetVbiosVersion", "how": "KeyError: 'no such field'"},
    }
    assert [gpu.get("name") for gpu in gpus] == ["NVIDIA H100 80GB HBM3", None, gpus[0]["name"]]
    assert outcome.facts["p2p"] == {"OK": [[0, 2]]}
    cluster = make_cluster(["nd0"], 1, check=CHECK.name, by_host={"nd0": outcome}, backend="nccl")
    only(CHECK, cluster, "gpu-unhealthy", hosts=["nd0"], devices=[uuid(1)])


def test_a_surprise_at_every_gpu_is_the_mistake_of_the_check(library: Path, tmp_path: Path) -> None:
    outcome = seen(library, tmp_path, {0, 1, 2})
    assert outcome.status is OutcomeStatus.RAISED
    assert "no such field" in outcome.reason


RAISED = gpu(0, 2) | {"raised": {"call": "nvmlDeviceGetName", "how": "KeyError: 'x'"}}


def test_what_reading_raised_is_said_of_that_gpu_alone() -> None:
    gpus = [gpu(0, index) for index in range(8)]
    known = {key: RAISED[key] for key in ("index", "uuid", "lost", "refused", "raised")}
    gpus[2] = known
    cluster = cluster_of(state(0, gpus))
    found = only(CHECK, cluster, "gpu-unhealthy", hosts=["nd0"], devices=["GPU-0-2"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)
    assert "nvmlDeviceGetName ended with KeyError: 'x'" in found.message
    gpus[2] = {key: known[key] for key in known if key != "uuid"}
    assert [each.code for each in judge(CHECK, cluster_of(state(0, gpus)))] == ["gpu-unhealthy"]
