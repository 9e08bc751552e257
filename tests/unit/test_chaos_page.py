"""Records of `make chaos` and the page that is made from them; options that make no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos
from tests.lab.chaos import SEED, WORDS, plan
from tests.lab.chaos.judging import Judgement
from tests.lab.chaos.records import Record, Records


def record(number: int = 0, *, struck: bool = True, seed: int = SEED, **judged: Any) -> Record:
    return Record(
        plan=plan(seed, number),
        judgement=Judgement(**judged),
        struck=struck,
        what="process 7 python of nd1",
        seconds=3.1,
        codes=(1, None),
        verdicts={"run": "fail"},
        causes=("run: rank-killed (nd1)",),
        births=44,
        lag_s=0.1,
        patience=1.0,
        day="2026-11-22",
        versions={"nccl-doctor": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    )


def test_records_survive_and_are_not_made_again(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    first, second = record(3, late=("nd0: python",)), record(5, unknown=True)
    for each in (first, second, replace(first, struck=False), record(4, seed=SEED + 1)):
        Records(file, SEED).add(each)
    again = Records(file, SEED)
    assert again.all == [replace(first, struck=False), second]
    assert again.missing(range(3, 7)) == [4, 6]


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path):
    file = tmp_path / "records.jsonl"
    Records(file, SEED).add(record(0))
    Records(file, SEED).add(record(1))
    file.write_text(file.read_text()[:-20])
    cut = Records(file, SEED)
    assert cut.missing(range(2)) == [1]
    cut.add(record(1))
    assert len(Records(file, SEED).all) == 2


def test_the_page_counts_every_run():
    made = [record(number) for number in range(chaos.WANTED - 3)]
    made.append(record(997, struck=False, unknown=True))
    made += [record(998), record(999)]
    met = chaos.bars(made)
    assert all(bar.met for bar in met)
    text = chaos.page(made, SEED)
    assert "| all | 1000 | 999 | 0 | 0 | 1 | 0 | 0 | 0 |" in text
    assert all(f"| {words} |" in text for words in WORDS.values())
    assert "2026-11-22, nccl-doctor 0.1.0, torch 2.13.0, Python 3.11.7, seed" in text
    assert text.endswith("None.\n")
    assert "missed" not in text


@pytest.mark.parametrize("kind", ["late", "blamed", "lies", "tracebacks", "leftovers"])
def test_each_broken_promise_misses_a_bar_and_is_listed(kind: str):
    made = [record(number) for number in range(chaos.WANTED)]
    made[17] = record(17, **{kind: ("what | happened",)})
    assert len([bar for bar in chaos.bars(made) if not bar.met]) == 1
    text = chaos.page(made, SEED)
    assert text.count("**missed**") == 1
    assert f"| 17 | {made[17].plan} |" in text
    assert "what \\| happened |" in text


def test_too_few_runs_miss_the_bar():
    assert [bar.met for bar in chaos.bars([record(0)])].count(False) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs", "many"], "argument --runs: 'many' is no number"),
        (["--runs", "-1"], "argument --runs: -1 is not between 0 and 100000"),
        (["--jobs", "0"], "argument --jobs: 0 is not between 1 and 100000"),
        (["--patience", "0.1"], "argument --patience: 0.1 is not between 1 and 20"),
        (["--patience", "nan"], "argument --patience: nan is not between 1 and 20"),
        (["--typo"], "unrecognized arguments: --typo"),
    ],
)
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    with pytest.raises(SystemExit) as left:
        chaos.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"chaos: {message}\n"


@pytest.mark.parametrize("text", ["no JSON\n", "{}\n", "[]\n", '{"plan": 1, "judgement": {}}\n'])
def test_a_file_of_something_else_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
):
    file = tmp_path / "other"
    file.write_text(text)
    with pytest.raises(SystemExit) as left:
        chaos.main(["--records", str(file)])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"chaos: --records: {file}, line 1: ")
    assert said.count("\n") == 1
    assert file.read_text() == text


def test_all_recorded_runs_are_judged_together(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file, page = tmp_path / "records.jsonl", tmp_path / "page.md"
    records = Records(file, SEED)
    for number in range(2):
        records.add(record(number, lies=("run says pass",) if number else ()))
    words = ["--records", str(file), "--runs", "2", "--write", str(page)]
    assert chaos.main(words) == 1
    said = capsys.readouterr().out
    assert "MISSED runs: 1000: 2\n" in said
    assert "MISSED runs with lies: none: 1\n" in said
    assert "| all | 2 | 2 | 0 | 0 | 0 | 1 | 0 | 0 |" in page.read_text()
