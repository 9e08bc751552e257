"""Real gloo ranks of which one hangs: who is blamed, and what the evidence says of the others."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.model.check import Context
from nccl_doctor.model.cluster import OutcomeStatus
from nccl_doctor.model.launch import Launch
from nccl_doctor.observe import probe
from nccl_doctor.toolkit.groups.forming import speak_up, take_device
from nccl_doctor.toolkit.groups.witness import watch
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from tests.broken import broken
from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.xdist_group("torch")

DEADLINE_S = 6


def has_recorder() -> bool:
    import torch

    return hasattr(torch._C._distributed_c10d, "_dump_fr_trace")


def test_a_rank_that_sleeps_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    if not has_recorder():
        pytest.skip("this torch records nothing of gloo")
    ranks = Ranks(
        tmp_path,
        3,
        ["--select", "collectives,exchanges", "--collective-timeout", str(DEADLINE_S)],
        changes={1: broken("sleeps_in_its_second_all_reduce")},
    )
    ended = ranks.wait(60)
    assert {each.code for each in ended.values()} == {1}, ended
    # One round runs into its deadline, and nothing is tried again: there is a culprit.
    assert max(each.seconds for each in ended.values()) < DEADLINE_S + 30
    report = ranks.report()
    (root,) = report["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("rank-frozen", [1])
    assert "never entered" in root["message"]
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses == {"collectives": "fail", "exchanges": "blocked"}  # it does not hang again
    evidence = root["evidence"]
    assert (evidence["entered"], evidence["finished"], evidence["never_came"]) == ("0–2", "", "")
    assert (evidence["lagging"], evidence["collective"]) == ("1", "all_reduce")
    assert evidence["sequence"] == 2
    waiting, asleep = evidence["doing"]
    assert (waiting["ranks"], asleep["ranks"]) == ("0, 2", "1")
    assert "all_reduce" in waiting["stack"]
    assert "sitecustomize.py" in asleep["stack"].splitlines()[0]
    assert "witness.py" not in str(evidence)
    recorder = {each["ranks"]: each["groups"][0] for each in evidence["recorder"]}
    pending = recorder["0, 2"]["pending"]
    assert (pending["collective"], pending["sequence"]) == ("gloo:all_reduce", 2)
    assert recorder["0, 2"]["last_completed"]["sequence"] == 1
    assert (recorder["1"]["enqueued"], recorder["1"]["pending"]) == (1, None)


def context(line: probe.Line, deadline: float, **fields: Any) -> Context:
    launch = Launch(launcher="plain", rank=0, world_size=1, local_rank=0)
    return Context(launch, {}, deadline=deadline, witness=line.witness, group=(0,), **fields)


def outcome_of(work: probe.Work, seconds: float) -> Any:
    (outcome,) = probe.run([probe.ProbeJob("words", work, time.monotonic() + seconds)])
    return outcome


def test_what_c_code_said_before_the_kill_is_kept() -> None:
    def work(line: probe.Line) -> dict[str, Any]:
        speak_up(context(line, time.monotonic() + 60))
        ctypes.CDLL(None).printf(b"host:1:2 [0] NCCL WARN a line of C\n")
        time.sleep(60)
        return {}

    assert "a line of C" in outcome_of(work, 1).log_tail


@pytest.mark.parametrize("before", [{}, {"NCCL_DEBUG_FILE": "/tmp/of-the-user.%p"}])
def test_nccl_writes_into_no_file_of_the_user(tmp_path: Path, before: dict[str, str]) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG_FILE=/tmp/of-the-file.%p\nNCCL_ALGO=Ring\n")

    def work(line: probe.Line) -> dict[str, Any]:
        os.environ.update(before)
        speak_up(context(line, time.monotonic() + 60, backend="nccl"))
        found = nccl_settings(os.environ, tmp_path, tmp_path)
        return {name: found[name].value for name in ("NCCL_DEBUG_FILE", "NCCL_ALGO")}

    assert outcome_of(work, 10).facts == {"NCCL_DEBUG_FILE": "", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("round_name", "before", "level"),
    [
        ("world", None, "WARN"),
        ("world-again", None, "INFO"),
        ("world", "INFO", "INFO"),
        ("world-again", "WARN", "INFO"),
        ("world-again", "TRACE", "TRACE"),
    ],
)
def test_nccl_says_more_when_a_hang_is_tried_again(
    round_name: str, before: str | None, level: str
) -> None:
    def work(line: probe.Line) -> dict[str, Any]:
        os.environ.pop("NCCL_RAS_ADDR", None)
        os.environ.pop("NCCL_DEBUG", None)
        if before:
            os.environ["NCCL_DEBUG"] = before
        speak_up(context(line, time.monotonic() + 60, round=round_name, backend="nccl"))
        return {name: os.environ[name] for name in ("NCCL_DEBUG", "NCCL_RAS_ADDR")}

    facts = outcome_of(work, 10).facts
    assert facts["NCCL_DEBUG"] == level
    assert facts["NCCL_RAS_ADDR"].startswith("127.0.0.1:")


def test_nccls_inspector_leaves_no_files_of_the_examination(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_INSPECTOR_ENABLE=1\n")

    def work(line: probe.Line) -> dict[str, Any]:
        os.environ["NCCL_INSPECTOR_ENABLE"] = "1"
        speak_up(context(line, time.monotonic() + 60, backend="nccl"))
        return {"on": nccl_settings(os.environ, tmp_path, tmp_path)["NCCL_INSPECTOR_ENABLE"].value}

    assert outcome_of(work, 10).facts == {"on": "0"}


def test_a_rank_of_a_group_uses_one_thread() -> None:
    """With more on every core, the ranks of a host spend most of their time waiting in loops."""

    def work(line: probe.Line) -> dict[str, Any]:
        import torch

        torch.set_num_threads(2)
        take_device(context(line, time.monotonic() + 60), "world")
        return {"threads": torch.get_num_threads()}

    assert outcome_of(work, 60).facts == {"threads": 1}


def test_a_healthy_child_is_neither_kept_nor_slowed() -> None:
    def work(line: probe.Line) -> dict[str, Any]:
        watch(context(line, time.monotonic() + 2))
        return {"done": True}

    outcome = outcome_of(work, 2)
    assert outcome.status is OutcomeStatus.OK
    assert outcome.duration_s < 1


def test_a_stuck_child_says_its_word_once_and_before_its_end() -> None:
    def work(line: probe.Line) -> dict[str, Any]:
        ctx = context(line, time.monotonic() + 2)
        watch(ctx)
        watch(ctx)
        time.sleep(60)
        return {}

    outcome = outcome_of(work, 2)
    assert outcome.status is OutcomeStatus.HUNG
    assert outcome.witness == ({"recorder": {"groups": []}} if has_recorder() else {})
