"""Is what the doctor says right? The whole corpus of injected faults, and plain torchrun beside it.

Every record of tests/lab/corpus is set up in a fresh lab and examined, and what each host prints
is scored; then plain torchrun with every way in which ranks talk runs on the same fault, several at
a time, as it mostly waits: a failure where that job ends well is a defect, if it does so each time
(one that only chance brings to its end is none that runs). Then come faults that nobody chose
(tests/lab/corpus/blind), and healthy clusters again and again. With `--fixes`, the fixes that are
printed are typed as well, and taken back. Writes a page with every case and the bars. With
`--records`, a run that has a result is not made again.

    python benchmarks/accuracy.py --write docs/accuracy.md
    python benchmarks/accuracy.py --only absent-last --no-stock --blind 0 --healthy 0

Exit code 0 where every bar is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.corpus import Case, blind, load
from tests.lab.corpus.page import BY_HAND, HEALTHY_JOIN_S, HELPS, JOIN_S, Row, bars, page, seen
from tests.lab.corpus.records import Records
from tests.lab.corpus.runs import Result, run
from tests.lab.corpus.score import score
from tests.lab.corpus.stock import Stock, can_be_tried, run_again, run_stock
from tests.lab.corpus.typed import Typed, can_be_typed, mistyped, type_fixes
from tests.lab.hosts import trouble
from tests.lab.lab import TOTAL_S
from tests.lab.processes import LabError

BLIND = 150
"""Faults of the blind slice."""
HEALTHY = 200


def main() -> int:
    """Run the corpus; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="ids of faults")
    parser.add_argument("--blind", type=int, default=BLIND, help="faults that nobody chose")
    parser.add_argument("--seed", type=int, default=blind.SEED, help="of those, to look for more")
    parser.add_argument("--first", type=int, default=0, help="number of the first of those")
    parser.add_argument("--healthy", type=int, default=HEALTHY, help="number of healthy runs")
    parser.add_argument("--records", type=Path, help="keep results in this file, and go on with it")
    parser.add_argument("--texts", type=Path, help="folder for all output of runs that are wrong")
    parser.add_argument("--no-stock", action="store_true", help="leave plain torchrun out")
    parser.add_argument(
        "--stock", type=Path, help="keep what plain torchrun said in this file, and take it from it"
    )
    parser.add_argument(
        "--fixes", type=Path, help="type the fixes too; keep what came of them in this file"
    )
    parser.add_argument(
        "--jobs", type=int, default=4, help="plain torchruns, and typed fixes, at a time"
    )
    parser.add_argument("--write", type=Path, help="page to write")
    args = parser.parse_args()
    if reason := trouble():
        print(reason, file=sys.stderr)
        return 1
    if args.write and args.seed != blind.SEED:
        print(f"the page is about seed {blind.SEED}, not {args.seed}", file=sys.stderr)
        return 2
    corpus = load()
    unknown = set(args.only) - {case.id for case in (*corpus.faults, *corpus.healthy)}
    if unknown:
        print(f"no case is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [case for case in corpus.faults if not args.only or case.id in args.only]
    calm = [case for case in corpus.healthy if case.id in args.only] or corpus.healthy
    runs = Runs(Records(args.records), args.texts)
    unseen = [runs.row(case, JOIN_S) for case in blind.cases(args.seed, args.blind, args.first)]
    faults = [runs.row(case, JOIN_S) for case in chosen]
    healthy = [
        runs.row(case, HEALTHY_JOIN_S, number)
        for number, case in enumerate(islice(cycle(calm), args.healthy))
    ]
    failed = {case.id for case, result in faults if result.score.fails}
    worth = [case for case in chosen if can_be_tried(case) and (case.stock or case.id in failed)]
    stock = {} if args.no_stock else _stock(worth, failed, args.jobs, args.stock)
    fixes = _typed(chosen, args.jobs, args.fixes) if args.fixes else {}
    met = bars(faults, unseen, healthy, fixes, stock)
    for bar in met:
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.text}: {bar.seen}")
    if args.write:
        text = page(faults, stock, unseen, healthy, met=met, fixes=fixes)
        args.write.write_text(text, encoding="utf-8")
    return 0 if all(bar.met for bar in met) else 1


def _stock(
    cases: Sequence[Case], failed: Collection[str], jobs: int, keep: Path | None
) -> dict[str, Stock]:
    """What plain torchrun says of each case; what `keep` knows already is not tried again.

    A job that runs although the doctor says `fail` (ids `failed`) is tried again.
    """
    known = json.loads(keep.read_text()) if keep and keep.exists() else {}
    stock = {name: Stock(**said) for name, said in known.items()}
    tried = [case for case in cases if case.id not in stock]
    with ThreadPoolExecutor(jobs) as pool:
        for try_it in (run_stock, run_again):
            for case, said in zip(tried, pool.map(try_it, tried), strict=True):
                stock[case.id] = said
                print(f"torchrun {case.id}: {said.words} ({said.ended})", flush=True)
                if keep:
                    keep.write_text(json.dumps({name: vars(each) for name, each in stock.items()}))
            tried = [case for case in tried if case.id in failed and stock[case.id].runs]
    return {case.id: stock[case.id] for case in cases if case.id in stock}


def _typed(cases: Sequence[Case], jobs: int, keep: Path) -> dict[str, str]:
    """What came of the fix of each case; what `keep` knows already is not tried again."""
    known: dict[str, str] = json.loads(keep.read_text()) if keep.exists() else {}
    tried = [case for case in cases if can_be_typed(case) and case.id not in known]
    keep.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(_type, case): case.id for case in tried}
        for done in as_completed(begun):
            name = begun[done]
            known[name] = done.result()
            print(f"fix {name}: {known[name]}", flush=True)
            keep.write_text(json.dumps(known))
    return {case.id: known[case.id] for case in cases if case.id in known}


def _type(case: Case) -> str:
    """What came of the fix in the answer, and of those that hosts that never met print."""
    wrong = mistyped(case, JOIN_S) if case.waits else []
    return f"**{'; '.join(wrong)}**" if wrong else _in_words(type_fixes(case, JOIN_S))


def _in_words(typed: Typed | None) -> str:
    if typed is None:
        return BY_HAND
    if typed.left:
        return f"**still {', '.join(sorted({code for code, _ in typed.left}))}**"
    if typed.undone is None:
        return f"{HELPS}, no undo"
    return HELPS if typed.undone.is_right else "**undo: not as before**"


class Runs:
    """Runs of cases, of which those that have a result are not made again."""

    def __init__(self, records: Records, texts: Path | None) -> None:
        """`texts`: folder for everything that a run said whose answer is wrong."""
        self._records, self._texts = records, texts

    def row(self, case: Case, join_s: float, number: int = 0) -> Row:
        """A case with the result of its run; `number` tells apart runs of one case."""
        key = f"{case.id} {number}"
        result = self._records.get(key)
        if result is None:
            try:
                result = run(case, join_s, fresh=True)
            except LabError as error:  # a run that does not come to its end has no answer
                result = Result(score(case, None), TOTAL_S, (None,), None, (), str(error))
            self._records.add(key, result)
            if self._texts and not (result.score.is_right_everywhere and not result.leftovers):
                self._texts.mkdir(parents=True, exist_ok=True)
                text = f"{case}\n{result.score}\n{result.text}\n"
                (self._texts / f"{case.id}.txt").write_text(text, encoding="utf-8")
        case = case.without(result.unstruck)
        right = result.score.is_right_everywhere
        mark = "right" if right else "WRONG"
        more = "" if right else f"  {seen(result)}, not {case.title}"
        print(f"{mark} {result.seconds:5.1f} s  {case.id}{more}", flush=True)
        return case, result


if __name__ == "__main__":
    sys.exit(main())
