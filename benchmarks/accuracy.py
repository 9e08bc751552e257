"""Is what the doctor says right? The whole corpus of injected faults, and plain torchrun beside it.

Every record of tests/lab/corpus is set up in a fresh lab and examined; then plain torchrun with an
all-reduce runs on the same fault, several at a time, as it mostly waits. Then come faults that
nobody chose (tests/lab/corpus/blind), and healthy clusters again and again. With `--fixes`, the
fixes that are printed are typed as well, and taken back. Writes a page with every case and the
bars. With `--records`, a run that has a result is not made again.

    python benchmarks/accuracy.py --write docs/accuracy.md
    python benchmarks/accuracy.py --only absent-last --no-stock --blind 0 --healthy 0

Exit code 0 where every bar is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.corpus import Case, blind, load
from tests.lab.corpus.figures import Figures, figures
from tests.lab.corpus.records import Records
from tests.lab.corpus.runs import STOCK_CAP_S, Result, Stock, run, run_stock
from tests.lab.corpus.score import score
from tests.lab.corpus.typed import Typed, can_be_typed, type_fixes
from tests.lab.hosts import trouble
from tests.lab.lab import TOTAL_S
from tests.lab.processes import LabError

JOIN_S = 10.0
HEALTHY_JOIN_S = 20.0
"""Hosts of healthy clusters may come 8 s late, and take their time to start."""
LAUNCHER_S = 6.0
AFTER_JOIN_S = 5.0
MEDIAN_S = 6.0
RIGHT = 0.95
WORKS = 0.95
"""Share of the printed fixes that have to work as typed."""
BY_HAND, HELPS = "by hand", "works"
BLIND = 150
"""Faults of the blind slice."""
HEALTHY = 200
PRECISION, RECALL, PLACE = 0.985, 0.993, 0.97
"""Least shares that the blind slice has to reach."""
PEER = ("98.2%", "99.3%", "95.7%")
"""The same of SkeletonHunter, in production: SIGCOMM 2025, as its authors published it."""

Row = tuple[Case, Result]


@dataclass(frozen=True)
class Bar:
    """One thing that has to hold, what was seen, and whether it does."""

    text: str
    seen: str
    met: bool


def bars(
    faults: Sequence[Row],
    unseen: Sequence[Row],
    healthy: Sequence[Row],
    fixes: Mapping[str, str] | None = None,
) -> list[Bar]:
    """Every bar, over the runs that were made; `fixes`: id of a fault → what came of its fix."""
    typed = [said for said in (fixes or {}).values() if said != BY_HAND]
    work = [said for said in typed if said.startswith(HELPS)]
    every = [*faults, *unseen, *healthy]
    found = _added(unseen)
    right = [row for row in faults if row[1].score.is_right]
    blamed = [case.id for case, result in every if result.score.blamed]
    over = [c.id for c, r in every if r.seconds > _deadline(c) or None in r.codes]
    loud = [case.id for case, result in healthy if not _is_healthy(result)]
    quick = [result.seconds for case, result in faults if not case.waits]
    slow = [result.seconds for case, result in faults if case.waits]
    return [
        Bar(
            f"right cause and place, of {len(faults)} faults: at least {RIGHT:.0%}",
            f"{len(right)} ({len(right) / max(1, len(faults)):.0%})",
            len(right) >= RIGHT * len(faults),
        ),
        *(
            Bar(
                f"{name} of the blind slice: at least {least:.1%}", str(share), share.value >= least
            )
            for name, share, least in (
                ("precision", found.precision, PRECISION),
                ("recall", found.recall, RECALL),
                ("place", found.place, PLACE),
            )
            if unseen
        ),
        Bar("healthy hosts blamed in any run: none", _few(blamed), not blamed),
        Bar(
            f"runs over their deadline of {TOTAL_S:g} s ({LAUNCHER_S:g} s more under torchrun or "
            "srun): none",
            _few(over),
            not over,
        ),
        Bar(
            f"of {len(healthy)} healthy runs, with a finding above info: none",
            _few(loud),
            not loud,
        ),
        Bar(
            f"median time to verdict without a join time-out: at most {MEDIAN_S:g} s",
            f"{statistics.median(quick):.1f} s" if quick else "not run",
            not quick or statistics.median(quick) <= MEDIAN_S,
        ),
        Bar(
            f"latest verdict after the join time-out of {JOIN_S:g} s: at most {AFTER_JOIN_S:g} s",
            f"{max(slow) - JOIN_S:.1f} s" if slow else "not run",
            not slow or max(slow) <= JOIN_S + AFTER_JOIN_S,
        ),
        *(
            [
                Bar(
                    f"printed fixes that work as typed, of {len(typed)}: at least {WORKS:.0%}",
                    f"{len(work)} ({len(work) / len(typed):.0%})",
                    len(work) >= WORKS * len(typed),
                )
            ]
            if typed
            else ()
        ),
    ]


def _deadline(case: Case) -> float:
    """Seconds until the last host has to be done: a launcher imports torch before it starts ranks,
    and stops them after.
    """
    return TOTAL_S + (0 if case.launcher in ("own", "plain") else LAUNCHER_S)


def _added(rows: Iterable[Row]) -> Figures:
    return figures((case, result.score) for case, result in rows)


def _is_healthy(result: Result) -> bool:
    return result.score.is_right and not any(result.codes) and not result.leftovers


def _few(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(sorted(set(names)))}" if names else "none"


# The page -----------------------------------------------------------------------------------------


def page(
    faults: Sequence[Row],
    stock: dict[str, Stock],
    unseen: Sequence[Row],
    healthy: Sequence[Row],
    *,
    met: Sequence[Bar],
    fixes: Mapping[str, str],
) -> str:
    """The page in Markdown."""
    day = datetime.now(timezone.utc).date().isoformat()
    out = [
        "# Accuracy",
        "",
        "Answers of nccl-doctor to injected faults, compared with plain `torchrun`.",
        "Written by `make accuracy`; do not edit. "
        f"{day}, nccl-doctor {version('nccl-doctor')}, torch {version('torch')} (gloo, CPU), "
        f"Python {platform.python_version()}.",
        "",
        "Each case runs once, on 2 to 4 hosts made of network namespaces: `nccl-doctor run` with "
        "the launcher that the case names (else its own), "
        f"`--join-timeout {JOIN_S:g}` (healthy ones {HEALTHY_JOIN_S:g}) and a "
        "shared `--output-dir`, started on every host at once. An answer is right if its "
        "findings above info that nothing explains are the injected ones, each with a right code "
        "at exactly the injected place, and nothing else. Seconds are from the "
        "start of the first host to the end of the last. If hosts could not reach each other, "
        "the answer is their partial reports, merged by `nccl-doctor report merge`. Plain torchrun "
        f"(static rendezvous, then an all-reduce) is stopped after {STOCK_CAP_S:g} s; the table "
        "shows the first line on any host that reports a problem. gloo connects each pair of ranks "
        "in one direction only, so that some one-way faults, which stop NCCL, do not stop that "
        "job. The records are in `tests/lab/corpus`. Where a fix was typed, on the hosts that it "
        f'names, it "{HELPS}" if the cluster was healthy after it, and as broken as before after '
        "its undo, where one is printed for each step.",
        "",
        "| limit | measured | |",
        "|---|---|---|",
        *(f"| {bar.text} | {bar.seen} | {'met' if bar.met else '**missed**'} |" for bar in met),
        "",
        *_three(faults, unseen, healthy),
        "",
        "## Faults",
        "",
        "| fault | hosts | cause and place | reported | s | fix | plain torchrun | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        _row(case, result, stock.get(case.id), fixes.get(case.id, "")) for case, result in faults
    ]
    silent = [each for each in stock.values() if each.seconds is None]
    runs = [each for each in stock.values() if each.ended == "exit 0"]
    if stock:
        out += [
            "",
            f"Plain torchrun was tried on {len(stock)} faults: it printed nothing within "
            f"{STOCK_CAP_S:g} s on {len(silent)}, and ran the job to its end on {len(runs)}.",
        ]
    if unseen:
        out += ["", *_blind(unseen)]
    out += [
        "",
        "## Healthy clusters",
        "",
        "| cluster | runs | above info | slowest, s |",
        "|---|---|---|---|",
    ]
    for case in {case.id: case for case, _ in healthy}.values():
        mine = [result for other, result in healthy if other is case]
        bad = Counter(str(cause) for each in mine for cause in each.score.reported)
        words = ", ".join(f"{text} ({times}×)" for text, times in bad.items()) or "none"
        slowest = max(each.seconds for each in mine)
        out.append(f"| {_cell(case.title)} | {len(mine)} | {_cell(words)} | {slowest:.1f} |")
    return "\n".join(out) + "\n"


def _three(faults: Sequence[Row], unseen: Sequence[Row], healthy: Sequence[Row]) -> list[str]:
    """Precision, recall and place, beside those of another system."""
    rows = {
        "the corpus, and healthy clusters": _added([*faults, *healthy]),
        f"the blind slice (seed {blind.SEED})": _added(unseen),
    }
    shown = {name: (each.precision, each.recall, each.place) for name, each in rows.items()}
    return [
        "## Precision, recall, place",
        "",
        "Precision: findings above info that nothing explains and that name an injected fault, of "
        "all such findings. "
        "Recall: injected causes that are named by a right code at a place of theirs. Place: of "
        "those, the ones whose place is right, all of it and no more. With Wilson intervals of "
        "95 %. SkeletonHunter's figures are its authors' (SIGCOMM 2025): of faults in production, "
        "which injected ones cannot stand for.",
        "",
        "| | precision | recall | place |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(str, three))} |" for name, three in shown.items()),
        f"| SkeletonHunter | {' | '.join(PEER)} |",
    ]


def _blind(unseen: Sequence[Row]) -> list[str]:
    """The blind slice, as it came."""
    out = [
        "## Faults that nobody chose",
        "",
        f"Drawn with seed {blind.SEED} from mechanisms, hosts, directions, moments and launchers; "
        "run once, and kept as they came. What is wrong here is mended afterwards, and proven by "
        "the seed of the next release.",
        "",
        "| | fault | launcher | hosts × ranks | cause and place | reported | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, result in unseen:
        wanted = "; ".join(map(str, case.expect))
        size = f"{case.hosts} × {case.nproc}"
        cells = [case.id.rpartition("-")[2], case.title, case.launcher, size, wanted, _seen(result)]
        out.append(f"| {' | '.join(map(_cell, cells))} | {result.seconds:.1f} |")
    return out


def _seen(result: Result) -> str:
    mark = "" if result.score.is_right else "**wrong**: "
    return mark + ("; ".join(map(str, result.score.reported)) or "nothing")


def _row(case: Case, result: Result, stock: Stock | None, fix: str) -> str:
    wanted = "; ".join(map(str, case.expect))
    words, seconds = "not tried", ""
    if stock is not None:
        words = f"{stock.words} ({stock.ended})"
        seconds = "–" if stock.seconds is None else f"{stock.seconds:.0f}"
    took = f"{result.seconds:.1f}"
    cells = [case.title, str(case.hosts), wanted, _seen(result), took, fix, words]
    return f"| {' | '.join(map(_cell, cells))} | {seconds} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Running ------------------------------------------------------------------------------------------


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
    stock = {} if args.no_stock else _stock(chosen, args.jobs, args.stock)
    fixes = _typed(chosen, args.jobs, args.fixes) if args.fixes else {}
    met = bars(faults, unseen, healthy, fixes)
    for bar in met:
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.text}: {bar.seen}")
    if args.write:
        text = page(faults, stock, unseen, healthy, met=met, fixes=fixes)
        args.write.write_text(text, encoding="utf-8")
    return 0 if all(bar.met for bar in met) else 1


def _stock(cases: Sequence[Case], jobs: int, keep: Path | None) -> dict[str, Stock]:
    """What plain torchrun says of each case; what `keep` knows already is not tried again."""
    known = json.loads(keep.read_text()) if keep and keep.exists() else {}
    stock = {name: Stock(**said) for name, said in known.items()}
    tried = [case for case in cases if case.stock and case.id not in stock]
    with ThreadPoolExecutor(jobs) as pool:
        for case, said in zip(tried, pool.map(run_stock, tried), strict=True):
            stock[case.id] = said
            print(f"torchrun {case.id}: {said.words} ({said.ended})", flush=True)
            if keep:
                keep.write_text(json.dumps({name: vars(each) for name, each in stock.items()}))
    return {case.id: stock[case.id] for case in cases if case.id in stock}


def _typed(cases: Sequence[Case], jobs: int, keep: Path) -> dict[str, str]:
    """What came of the fix of each case; what `keep` knows already is not tried again."""
    known: dict[str, str] = json.loads(keep.read_text()) if keep.exists() else {}
    tried = [case for case in cases if can_be_typed(case) and case.id not in known]
    keep.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(type_fixes, case, JOIN_S): case.id for case in tried}
        for done in as_completed(begun):
            name = begun[done]
            known[name] = _in_words(done.result())
            print(f"fix {name}: {known[name]}", flush=True)
            keep.write_text(json.dumps(known))
    return {case.id: known[case.id] for case in cases if case.id in known}


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
            if self._texts and not (result.score.is_right and not result.leftovers):
                self._texts.mkdir(parents=True, exist_ok=True)
                text = f"{case}\n{result.score}\n{result.text}\n"
                (self._texts / f"{case.id}.txt").write_text(text, encoding="utf-8")
        case = case.without(result.unstruck)
        mark = "right" if result.score.is_right else "WRONG"
        more = "" if result.score.is_right else f"  {_seen(result)}, not {case.title}"
        print(f"{mark} {result.seconds:5.1f} s  {case.id}{more}", flush=True)
        return case, result


if __name__ == "__main__":
    sys.exit(main())
