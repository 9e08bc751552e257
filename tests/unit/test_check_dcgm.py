"""Check dcgm beside stand-ins for `dcgmi` that answer, refuse, print rubbish, hang and die."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Launch, Severity, Skip, Untested
from nccl_doctor.checks.dcgm import Dcgm
from nccl_doctor.system.programs import LARGEST
from tests.dcgm.stand_in import UNREACHABLE, UNWATCHED, dcgmi, health, printing
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts as seen_by_torch
from tests.support.gpu_states import state

CHECK = Dcgm()
BUSY_S = 3.0


def observed(env: dict[str, str], left_s: float = 15.0, **fields: Any) -> Any:
    fields = {"backend": "nccl", **fields}
    context = Context(Launch(launcher="plain"), env, deadline=time.monotonic() + left_s, **fields)
    return CHECK.observe(context)


def cluster_of(facts: Any, *, gpus: bool = False, taken: int = 0) -> Cluster:
    """nd0 with what DCGM said; with its eight GPUs, of which the ranks take the first ones."""
    cluster = make_cluster(["nd0"], 8, check="dcgm", by_host={"nd0": facts}, backend="nccl")
    for seat in range(8) if taken else ():
        seen = {"backend_device": {ALONE: outcome(seen_by_torch(0, min(seat, taken - 1)))}}
        cluster = change_rank(cluster, seat, facts=seen)
    if gpus:
        seen = {"gpu_state": {ALONE: outcome(state(0))}}
        (host,) = cluster.hosts
        host.facts.update(seen)  # type: ignore[attr-defined]
    return cluster


def test_a_healthy_host_gives_nothing(tmp_path: Path) -> None:
    facts = observed(printing(tmp_path, health()))
    assert facts == {"overall": "Healthy", "incidents": []}
    assert (tmp_path / "asked").read_text() == "health -c -j\n"  # nothing is set or started
    assert not judge(CHECK, cluster_of(facts))


@pytest.mark.parametrize(
    ("system", "words", "code"),
    [
        ("Memory system", "GPU 3 had uncorrectable memory errors and 2 rows were", "gpu-unhealthy"),
        (
            "Thermal system",
            "Detected clocks event due to thermal violation in GPU 3.",
            "gpu-throttled",
        ),
        ("Power system", "Detected clocks event due to power violation in GPU 3.", "gpu-throttled"),
        ("Power system", "Cannot reliably read the power usage for GPU 3.", "dcgm-unhealthy"),
        ("NVLINK system", "GPU 3's NvLink link 7 is currently down", "nvlink-down"),
        ("NVLINK system", "Detected 4 nvlink_flit_crc_error_count_total NvLink", "nvlink-errors"),
        (
            "PCIe system",
            "Detected more than 8 PCIe replays per minute for GPU 3 : 99",
            "pcie-errors",
        ),
        ("InfoROM system", "A corrupt InfoROM has been detected in GPU 3.", "dcgm-unhealthy"),
        ("ConnectX system", "anything", "dcgm-unhealthy"),
    ],
)
def test_the_same_cause_has_the_same_code_and_dcgms_words(
    system: str, words: str, code: str, tmp_path: Path
) -> None:
    said = health("Failure", gpu3={system: ("Failure", words)})
    facts = observed(printing(tmp_path, f"a line of a newer DCGM\n{said}"))
    found = only(CHECK, cluster_of(facts), code, hosts=["nd0"], devices=["GPU 3"])
    assert found.message == f"DCGM, {system}: Failure: {words}"
    assert (found.level, found.confidence.value, found.drains) == (Severity.WARN, "likely", False)


def test_switches_have_a_kind_of_their_own(tmp_path: Path) -> None:
    said = health("Failure", switch2={"NVLINK system": ("Failure", "Detected fatal errors on")})
    facts = observed(printing(tmp_path, said))
    only(CHECK, cluster_of(facts), "dcgm-unhealthy", hosts=["nd0"], devices=["Switch 2"])


def test_a_gpu_has_its_uuid_where_it_is_known_and_is_information_where_no_rank_takes_it(
    tmp_path: Path,
) -> None:
    said = health("Warning", gpu3={"Thermal system": ("Warning", "hot")})
    facts = observed(printing(tmp_path, said))
    cluster = cluster_of(facts, gpus=True, taken=8)
    found = only(CHECK, cluster, "gpu-throttled", hosts=["nd0"], devices=["GPU-0-3"])
    assert found.level is Severity.WARN
    cluster = cluster_of(facts, gpus=True, taken=2)
    found = only(CHECK, cluster, "gpu-throttled", hosts=["nd0"], devices=["GPU-0-3"])
    assert (found.level, found.message) == (
        Severity.INFO,
        "DCGM, Thermal system: Warning: hot; no rank uses this GPU",
    )


def test_an_unhealthy_host_without_an_incident_is_named(tmp_path: Path) -> None:
    facts = observed(printing(tmp_path, health("Warning")))
    only(CHECK, cluster_of(facts), "dcgm-unhealthy", hosts=["nd0"])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (UNREACHABLE, "no DCGM host engine answers here: Error: unable to establish a connection"),
        (UNWATCHED, "DCGM watches no GPU here"),
        ("Error: Unable to check health watches. Return: Version mismatch", "DCGM does not answer"),
    ],
)
def test_dcgm_that_says_that_it_knows_nothing_is_no_trouble(
    said: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(Skip) as raised:
        observed(printing(tmp_path, said, code=1))
    assert str(raised.value).startswith(reason)


def test_without_dcgmi_or_over_gloo_nothing_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="dcgmi is not installed here"):
        observed({"PATH": str(tmp_path)})
    with pytest.raises(Skip, match="the backend is gloo"):
        observed(dcgmi(tmp_path, f"touch {tmp_path}/asked"), backend="gloo")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Segmentation fault of sorts", "dcgmi health -c -j ended and said: Segmentation fault"),
        ("", "dcgmi health -c -j ended and said: nothing"),
        ('{"body": []}', 'dcgmi health -c -j ended and said: {"body": []}'),
        ('{"body": {"Overall', 'dcgmi health -c -j ended and said: {"body": {"Overall'),
        ("[" * 100_000, "dcgmi health -c -j ended and said: [["),
        ('{"a":' * 100_000, 'dcgmi health -c -j ended and said: {"a":'),
    ],
)
def test_rubbish_leaves_the_health_unknown(said: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Untested) as raised:
        observed(printing(tmp_path, said))
    assert str(raised.value).startswith(reason)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    "body",
    [
        {"Overall Health": {"value": "Failure"}, "GPU": {"children": {"0": 7}}},
        {"Overall Health": {"value": "Failure"}, "GPU": ["x"], "Switch": None},
        {"Overall Health": {"value": "Failure"}, "GPU": {"children": {"0": {"children": []}}}},
    ],
)
def test_another_form_is_read_as_far_as_it_goes(body: Any, tmp_path: Path) -> None:
    import json

    facts = observed(printing(tmp_path, json.dumps({"body": body})))
    only(CHECK, cluster_of(facts), "dcgm-unhealthy", hosts=["nd0"])


def test_a_dcgmi_that_hangs_is_ended_in_time_and_said(tmp_path: Path) -> None:
    env = dcgmi(tmp_path, f"echo $$ > {tmp_path}/pid\nexec sleep 1000")
    started = time.monotonic()
    with pytest.raises(Untested, match="dcgmi health did not end within 2 s"):
        observed(env, left_s=7.0)
    assert time.monotonic() - started < 2.0 + BUSY_S
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_dcgmi_that_stays_deaf_is_killed(tmp_path: Path) -> None:
    env = dcgmi(tmp_path, f"trap '' TERM\necho $$ > {tmp_path}/pid\nwhile :; do sleep 0.05; done")
    started = time.monotonic()
    with pytest.raises(Untested, match="did not end within 1 s"):
        observed(env, left_s=6.0)
    assert time.monotonic() - started < 1.0 + 3.0 + BUSY_S
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_dcgmi_that_dies_or_never_stops_talking_is_said(tmp_path: Path) -> None:
    with pytest.raises(Untested, match="ended with -9 and said: nothing"):
        observed(dcgmi(tmp_path / "dies", "kill -9 $$"))
    with pytest.raises(Untested, match=f"printed more than {LARGEST >> 20} MiB"):
        observed(dcgmi(tmp_path / "talks", "exec yes"))
    unreadable = dcgmi(tmp_path / "broken", "")
    (tmp_path / "broken/dcgmi").write_text("#!/no/such/shell\n")
    with pytest.raises(Untested, match="dcgmi cannot be started"):
        observed(unreadable)
