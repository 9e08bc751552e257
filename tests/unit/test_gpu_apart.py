"""Calls in processes of their own: what one of them does is no other's loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Confidence, Context, Launch, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_state.gather import gather_gpus
from nccl_doctor.checks.gpu_state.in_service import programs_in_service
from nccl_doctor.model.cluster import MAX_BREADCRUMBS
from nccl_doctor.system.forks import STOPPED_S
from nccl_doctor.toolkit.gpu.apart import each_apart
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


def test_of_many_breadcrumbs_at_once_the_last_are_heard(tmp_path: Path) -> None:
    def many(crumb: Any) -> int:
        for number in range(3 * MAX_BREADCRUMBS):
            crumb("asking", call=f"{number}")
        (tmp_path / "said").touch()
        return 7

    said: list[str] = []

    def waits(step: str, call: str) -> None:
        while not (tmp_path / "said").exists():  # meanwhile the others come
            time.sleep(0.01)
        said.append(call)

    (end,) = each_apart([many], 20.0, waits)
    assert (end.value, end.crumb["call"]) == (7, str(3 * MAX_BREADCRUMBS - 1))
    assert said[-MAX_BREADCRUMBS:] == [str(2 * MAX_BREADCRUMBS + n) for n in range(MAX_BREADCRUMBS)]


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


def described(library: Path, folder: Path, answer: str, left_s: float = 30.0) -> Outcome:
    """Four GPUs, of which GPU 1 has this answer for its name."""
    (folder / "dev").mkdir()
    (folder / "dev/kmsg").write_text("")
    machine = h100s(4)
    machine["1"]["nvmlDeviceGetName"] = answer
    until = time.monotonic() + left_s

    def look(crumb: Any) -> Mapping[str, Any]:
        context = Context(launch=Launch(), env={}, root=folder, deadline=until, breadcrumb=crumb)
        return CHECK.observe(context)

    return observe(library, write(machine, folder / "machine"), look, left_s + 5.0)


def test_a_reader_that_was_killed_is_started_once_more(library: Path, tmp_path: Path) -> None:
    outcome = described(library, tmp_path, "!once 9")
    assert (outcome.status, outcome.reason) == (OutcomeStatus.OK, "")
    assert [gpu.get("wedged") for gpu in outcome.facts["gpus"]] == [None] * 4


@pytest.mark.parametrize(("signal_", "left_s"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 60.0)])
def test_a_gpu_whose_reader_is_killed_or_stopped_is_not_known_and_the_others_are(
    library: Path, tmp_path: Path, signal_: signal.Signals, left_s: float
) -> None:
    began = time.monotonic()
    outcome = described(library, tmp_path, f"!signal {signal_.value}", left_s)
    assert (
        time.monotonic() - began < 2 * STOPPED_S + 5.0
    )  # one that is stopped may be stopped again
    assert outcome.status is OutcomeStatus.OK, outcome
    words = "ended by SIGKILL" if signal_ is signal.SIGKILL else "is stopped (state T"
    assert outcome.reason.startswith("the state of GPU 1 is not known: ")
    assert words in outcome.reason
    assert [bool(gpu.get("wedged")) for gpu in outcome.facts["gpus"]] == [False, True, False, False]
    made = make_cluster(["nd0"], 1, check=CHECK.name, by_host={"nd0": outcome}, backend="nccl")
    found = only(CHECK, made, "gpu-state-unread", hosts=["nd0"], devices=[uuid(1)])
    assert found.level is Severity.WARN
    assert words in found.message


def test_a_driver_that_kills_every_reader_is_not_known(library: Path, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    machine = {"-": {"nvmlInitWithFlags": "!signal 9"}}
    file = write(machine, tmp_path / "machine")
    outcome = observe(library, file, lambda crumb: gather_gpus(crumb, tmp_path))
    assert outcome.status is OutcomeStatus.UNTESTED
    assert outcome.reason == (
        "the state of the GPU driver is not known: the process that asked was ended by SIGKILL in "
        "nvmlInit"
    )


def test_programs_that_work_on_gpus_are_known_by_name_and_words(tmp_path: Path) -> None:
    for pid, (name, words) in enumerate(
        {
            "nvidia-smi": ["nvidia-smi", "--gpu-reset", "-i", "3"],
            "modprobe": ["modprobe", "-r", "nvidia"],
            "dkms": ["/bin/sh", "/usr/sbin/dkms", "install"],
            "python": ["python", "--gpu-reset"],
        }.items(),
        10,
    ):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n")
        (tmp_path / f"proc/{pid}/cmdline").write_text("\0".join(words) + "\0")
    assert programs_in_service(tmp_path) == ["dkms", "modprobe nvidia", "nvidia-smi --gpu-reset"]
    for name, words in {
        "nvidia-smi": ["nvidia-smi", "-q"],
        "modprobe": ["modprobe", "nfs"],
    }.items():
        (tmp_path / "proc/10/comm").write_text(f"{name}\n")
        (tmp_path / "proc/10/cmdline").write_text("\0".join(words) + "\0")
        assert programs_in_service(tmp_path) == ["dkms", "modprobe nvidia"]
