"""The page of `make accuracy`: bars are met or missed by what was seen, and every case is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.lab.corpus import Case, blind, load
from tests.lab.corpus.page import bars, page
from tests.lab.corpus.records import Records
from tests.lab.corpus.runs import Result
from tests.lab.corpus.score import Score
from tests.lab.corpus.stock import RUNS, Stock


def right(case: Case, seconds: float = 2.0) -> tuple[Case, Result]:
    code = 1 if case.expect else 0
    return case, Result(Score(case.expect, (), (), ()), seconds, (code, code), None, (), "")


def missed(
    faults: Sequence[object],
    healthy: Sequence[object],
    unseen: Sequence[object] = (),
) -> list[str]:
    return [bar.text for bar in bars(faults, unseen, healthy) if not bar.met]


def test_the_page_holds_every_case_and_every_bar() -> None:
    corpus = load()
    faults = [right(case) for case in corpus.faults]
    healthy = [right(case) for case in (*corpus.healthy, *corpus.healthy)]
    unseen = [right(case) for case in blind.cases(blind.SEED, 5)]
    stock = {corpus.faults[0].id: Stock("nothing", None, "nd0 still waiting")}
    met = bars(faults, unseen, healthy)
    fixes = {corpus.faults[0].id: "works", corpus.faults[1].id: "by hand"}
    text = page(faults, stock, unseen, healthy, met=met, fixes=fixes)
    assert " | 2.0 | works | nothing (nd0 still waiting) | – |" in text
    assert "named a cause of 0: the code of the fault on 0" in text
    known = replace(stock[corpus.faults[0].id], code="host-absent", sure="likely")
    told = page(faults, {corpus.faults[0].id: known}, [], healthy, met=met, fixes=fixes)
    assert "(nd0 still waiting); autopsy: host-absent (likely) |" in told
    assert "named a cause of 1: " in told
    assert all(bar.met for bar in met)
    for case in (*corpus.faults, *corpus.healthy, *(case for case, _ in unseen)):
        assert case.title.replace("|", "\\|") in text
    assert "| 2 | none | 2.0 |" in text
    assert "it printed nothing within 60 s on 1" in text
    assert "missed" not in text
    assert "SkeletonHunter | 98.2%" in text


def test_a_failure_where_the_job_runs_misses_its_bar_and_a_warning_does_not() -> None:
    case, said = right(next(case for case in load().faults if case.id == "ephemeral-dropped-last"))
    fails = replace(said, score=replace(said.score, fails=("peer-one-way",)))
    runs, waits = Stock("the job runs", 4.0, RUNS), Stock("nothing", None, "nd0 still waiting")

    def told(result: Result, stock: Stock) -> tuple[list[str], str]:
        met = bars([(case, result)], [], [], stock={case.id: stock})
        text = page([(case, result)], {case.id: stock}, [], [], met=met, fixes={})
        row = next(line for line in text.splitlines() if line.startswith(f"| {case.title}"))
        return [bar.seen for bar in met if not bar.met], row.split(" | ")[-1]

    assert told(fails, runs) == (["1: ephemeral-dropped-last"], "**fail, runs** |")
    assert told(fails, waits) == ([], "fail, does not run |")
    assert told(replace(said, codes=(0, 0)), runs) == ([], "warn, runs |")
    assert told(replace(said, codes=(3, 3)), runs) == ([], "unknown, runs |")


def test_what_a_screen_says_wrongly_is_shown_and_counts() -> None:
    case, said = right(load().faults[0])
    untrue = replace(said, score=replace(said.score, untrue=("nd1 prints x (nd1)",)))
    (bar,) = (bar for bar in bars([(case, untrue)], [], []) if not bar.met)
    assert bar.text.startswith("right on every host's screen")
    text = page([(case, untrue)], {}, [], [], met=[bar], fixes={})
    assert "; **nd1 prints x (nd1)** |" in text


def test_a_bar_can_be_missed() -> None:
    corpus = load()
    case = next(case for case in corpus.faults if case.waits)
    quick = next(case for case in corpus.faults if not case.waits)
    odd = corpus.healthy[0]
    wrong = Result(Score((), case.expect, (), ("nd0",)), 50.0, (None,), None, (), "")
    loud = Result(Score(quick.expect, (), quick.expect, ()), 2.0, (1, 1), None, (), "")
    assert missed([right(case)], [right(odd)]) == []
    assert len(missed([(case, wrong)], [])) == 5
    assert len(missed([right(quick, 6.5)], [])) == 1
    assert len(missed([], [], [(case, wrong)])) == 3  # recall, blamed, late
    assert len(missed([right(case)], [(odd, loud)])) == 1


def test_fixes_that_do_not_work_miss_their_bar() -> None:
    typed = {str(number): "works" for number in range(19)} | {"x": "works, no undo"}
    seen = [bars([], [], [], {**typed, **more})[-1] for more in ({}, {"y": "by hand"})]
    assert [(bar.met, bar.seen) for bar in seen] == [(True, "20 (100%)")] * 2
    broken = {"y": "**still peer-blocked**", "z": "**undo: not as before**"}
    bar = bars([], [], [], {**typed, **broken})[-1]
    assert (bar.met, bar.seen) == (False, "20 (91%)")
    assert "printed fixes" not in bars([], [], [], {"y": "by hand"})[-1].text


def test_a_result_is_kept_and_read_again(tmp_path: Path) -> None:
    case = next(case for case in load().faults if case.expect[0].links)
    _, result = right(case)
    result = replace(result, score=replace(result.score, untrue=("a",), fails=("b", "c")))
    Records(tmp_path / "kept" / "records.jsonl").add("a 0", result)
    records = Records(tmp_path / "kept" / "records.jsonl")
    assert records.get("a 0") == result
    assert records.get("a 1") is None
    assert Records(None).get("a 0") is None
