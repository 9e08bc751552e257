"""DeepSpeed itself, over gloo: what it makes of a default group, and who cannot import it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.broken import broken
from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
COLLECTIVE_S = 8.0
IMPORT_S = 40.0  # three imports, of 0.4 s each where nobody else is at work
OPTIONS = ("--select", "deepspeed_groups", "--collective-timeout", str(COLLECTIVE_S))


def rounds_of(report: dict[str, Any], rank: int) -> dict[str, Any]:
    (found,) = [each for each in report["ranks"] if each["rank"] == rank]
    rounds: dict[str, Any] = found["facts"]["deepspeed_groups"]
    return rounds


def test_a_group_of_torchs_is_kept_and_one_of_its_own_is_unbound(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("home", "temp")}
    for place in places.values():
        place.mkdir()
    changes = {"HOME": str(places["home"]), "TMPDIR": str(places["temp"])}
    ranks = Ranks(
        tmp_path, 2, (*OPTIONS, "--groups", "many"), changes=dict.fromkeys(range(2), changes)
    )
    ended = ranks.wait(IMPORT_S + 3 * COLLECTIVE_S)
    assert {each.code for each in ended.values()} == {0}, ended
    report = ranks.report()
    assert report["findings"] == []
    assert [check["status"] for check in report["checks"]] == ["pass"]
    for rank in range(2):
        rounds = rounds_of(report, rank)
        assert set(rounds) == {"import", "wraps", "own"}
        wraps, own = rounds["wraps"]["facts"], rounds["own"]["facts"]
        assert (wraps["kept"], wraps["backend_kept"]) == (True, True)
        assert wraps["timeout_kept"] in (True, None)
        assert wraps["bound_device_id"] is own["bound_device_id"] is None
        assert own["backend_class"].endswith("ProcessGroupGloo")
        assert wraps["wrong"] == own["wrong"] == []
    # Neither operators nor tables of kernels were left anywhere.
    assert [*places["home"].iterdir(), *places["temp"].iterdir()] == []


def test_a_job_without_it_is_not_examined(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, OPTIONS)
    ranks.wait(IMPORT_S + COLLECTIVE_S)
    (check,) = ranks.report()["checks"]
    assert check["status"] == "skipped"
    assert "no sign that the job uses DeepSpeed" in check["reason"]


def test_a_rank_that_cannot_import_it(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1}')
    ranks = Ranks(
        tmp_path,
        3,
        (*OPTIONS, "--deepspeed-config", str(config)),
        changes={1: broken("deepspeed_lacks_a_library")},
    )
    ended = ranks.wait(IMPORT_S + COLLECTIVE_S)
    assert {each.code for each in ended.values()} == {1}, ended
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("deepspeed-missing", [1])
    assert "libcudart.so.12" in root["message"]


def test_a_wrong_result_names_the_rank_that_sees_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, (*OPTIONS, "--groups", "many"), changes={1: broken("wrong_result")})
    ended = ranks.wait(IMPORT_S + 3 * COLLECTIVE_S)
    assert {each.code for each in ended.values()} == {1}, ended
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("collective-wrong-result", [1])
