"""The page of `make accuracy`: bars are met or missed by what was seen, and every case is there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.lab.corpus import Case, blind, load
from tests.lab.corpus.records import Records
from tests.lab.corpus.runs import Result, Stock
from tests.lab.corpus.score import Score

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def right(case: Case, seconds: float = 2.0) -> tuple[Case, Result]:
    code = 1 if case.expect else 0
    return case, Result(Score(case.expect, (), (), ()), seconds, (code, code), None, (), "")


def missed(
    accuracy: ModuleType,
    faults: Sequence[object],
    healthy: Sequence[object],
    unseen: Sequence[object] = (),
) -> list[str]:
    return [bar.text for bar in accuracy.bars(faults, unseen, healthy) if not bar.met]


def test_the_page_holds_every_case_and_every_bar(accuracy: ModuleType) -> None:
    corpus = load()
    faults = [right(case) for case in corpus.faults]
    healthy = [right(case) for case in (*corpus.healthy, *corpus.healthy)]
    unseen = [right(case) for case in blind.cases(blind.SEED, 5)]
    stock = {corpus.faults[0].id: Stock("nothing", None, "nd0 still waiting")}
    met = accuracy.bars(faults, unseen, healthy)
    fixes = {corpus.faults[0].id: "works", corpus.faults[1].id: "by hand"}
    text = accuracy.page(faults, stock, unseen, healthy, met=met, fixes=fixes)
    assert " | 2.0 | works | nothing (nd0 still waiting) | – |" in text
    assert all(bar.met for bar in met)
    for case in (*corpus.faults, *corpus.healthy, *(case for case, _ in unseen)):
        assert case.title.replace("|", "\\|") in text
    assert "| 2 | none | 2.0 |" in text
    assert "it printed nothing within 60 s on 1" in text
    assert "missed" not in text
    assert "SkeletonHunter | 98.2%" in text


def test_a_bar_can_be_missed(accuracy: ModuleType) -> None:
    corpus = load()
    case = next(case for case in corpus.faults if case.waits)
    quick = next(case for case in corpus.faults if not case.waits)
    odd = corpus.healthy[0]
    wrong = Result(Score((), case.expect, (), ("nd0",)), 50.0, (None,), None, (), "")
    loud = Result(Score(quick.expect, (), quick.expect, ()), 2.0, (1, 1), None, (), "")
    assert missed(accuracy, [right(case)], [right(odd)]) == []
    assert len(missed(accuracy, [(case, wrong)], [])) == 4
    assert len(missed(accuracy, [right(quick, 6.5)], [])) == 1
    assert len(missed(accuracy, [], [], [(case, wrong)])) == 3  # recall, blamed, late
    assert len(missed(accuracy, [right(case)], [(odd, loud)])) == 1


def test_fixes_that_do_not_work_miss_their_bar(accuracy: ModuleType) -> None:
    typed = {str(number): "works" for number in range(19)} | {"x": "works, no undo"}
    bars = [accuracy.bars([], [], [], {**typed, **more})[-1] for more in ({}, {"y": "by hand"})]
    assert [(bar.met, bar.seen) for bar in bars] == [(True, "20 (100%)")] * 2
    broken = {"y": "**still peer-blocked**", "z": "**undo: not as before**"}
    bar = accuracy.bars([], [], [], {**typed, **broken})[-1]
    assert (bar.met, bar.seen) == (False, "20 (91%)")
    assert "printed fixes" not in accuracy.bars([], [], [], {"y": "by hand"})[-1].text


def test_a_result_is_kept_and_read_again(tmp_path: Path) -> None:
    case = next(case for case in load().faults if case.expect[0].links)
    _, result = right(case)
    Records(tmp_path / "kept" / "records.jsonl").add("a 0", result)
    records = Records(tmp_path / "kept" / "records.jsonl")
    assert records.get("a 0") == result
    assert records.get("a 1") is None
    assert Records(None).get("a 0") is None
