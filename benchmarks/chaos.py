"""What becomes of a run that something strikes at a random moment? Many runs, judged from outside.

Each run is a pure function of the seed and its number: tests/lab/chaos says what it is. Records
are kept, one JSON line each; runs that have one are not made again. The page is made from all
records of the seed.

    python benchmarks/chaos.py --runs 100 --from 200 --jobs 2 --write docs/chaos.md
    python benchmarks/chaos.py --only 217

Exit code 0 where every bar is met by all records, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.chaos import LAUNCHERS, SEED, WORDS, plan
from tests.lab.chaos.records import Record, Records
from tests.lab.chaos.runs import COLLECTIVE_S, JOIN_S, LIMIT_S, run
from tests.lab.chaos.warden import GRACE_S
from tests.lab.hosts import trouble
from tests.lab.processes import LabError

WANTED = 1000
"""Runs that the bar is about."""
MOST = 100_000
RECORDS = Path("build/chaos/records.jsonl")
HEAD = ("runs", "struck", "late", "false blame", "unknown", "lies", "tracebacks", "leftovers")

Test = Callable[[Record], object]
COLUMNS: tuple[Test, ...] = (
    lambda record: True,
    lambda record: record.struck,
    lambda record: record.judgement.late,
    lambda record: record.judgement.blamed,
    lambda record: record.judgement.unknown,
    lambda record: record.judgement.lies,
    lambda record: record.judgement.tracebacks,
    lambda record: record.judgement.leftovers,
)
"""Whether a run counts in a column of `HEAD`."""


@dataclass(frozen=True)
class Bar:
    """One thing that has to hold, what was seen, and whether it does."""

    text: str
    seen: str
    met: bool


def bars(records: Sequence[Record]) -> list[Bar]:
    """Every bar, over the runs that were made."""
    counts = dict(zip(HEAD, count(records), strict=True))
    zero = ("late", "false blame", "lies", "tracebacks", "leftovers")
    texts = {"late": f"runs that ended later than the time-out and {GRACE_S:g} s"}
    texts |= {name: f"runs with {name}" for name in zero[1:]}
    return [
        Bar(f"runs: {WANTED}", str(len(records)), len(records) >= WANTED),
        *(Bar(f"{texts[name]}: none", str(counts[name]), not counts[name]) for name in zero),
    ]


def count(records: Iterable[Record]) -> list[int]:
    """Number of runs in each column of `HEAD`."""
    every = list(records)
    return [sum(1 for record in every if test(record)) for test in COLUMNS]


# The page -----------------------------------------------------------------------------------------


def page(records: Sequence[Record], seed: int) -> str:
    """The page in Markdown."""
    days = sorted({record.day for record in records})
    versions = sorted({_versions(record) for record in records})
    patience = sorted({record.patience for record in records})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    words = " and ".join(f"{each:g}" for each in patience)
    out = [
        "# Chaos",
        "",
        "Runs of nccl-doctor that something strikes at a random moment. "
        f"Written by `make chaos`; do not edit. {span}, {'; '.join(versions)}, seed {seed}.",
        "",
        "A run is one examination with its own launcher, torchrun or plain variables, of 2 to 4 "
        "hosts with 1 or 2 ranks each, made of network namespaces (gloo, CPU). The seed and the "
        "number of a run decide everything: the strike, the victim, and the moment, which is a "
        "number of processes and threads that have begun on that host, and a pause. "
        f"`--join-timeout {JOIN_S:g} --collective-timeout {COLLECTIVE_S:g} --timeout {LIMIT_S:g}`, "
        f"each times {words} for the speed of the machine that ran them. The program is forked "
        "from a process that has imported torch, so no strike hits that import. Runs that broke a "
        "promise are made again after a change of the program: the last result of a number counts.",
        "",
        "Everything is judged from outside, by process tables, exit codes, output and reports:",
        "",
        "- **struck**: the strike hit a run that was alive. The others count as not disturbed.",
        f"- **late**: a process that is not stopped was there {GRACE_S:g} s after the time-out.",
        "- **false blame**: a finding above info, not explained by another one, in any report of "
        "the run, names a host, rank or link that the strike did not touch.",
        "- **unknown**: a run that did not pass names no cause. It is counted; there is no limit.",
        "- **lies**: a pass, or exit code 0, with something not measured or a run that the strike "
        "had broken; an exit code that contradicts the report.",
        "- **tracebacks** on stderr; **leftovers**: processes, sockets, shared memory, files, "
        "locks, addresses, routes or firewall rules.",
        "",
        "A time namespace can only set the clocks that count from the start of the machine, and "
        "only before a process starts: in these runs the victim's uptime differs from the start. "
        "The wall clock has tests of its own. If a cgroup has too little memory, its largest "
        "process is killed from outside, as systemd-oomd does it: the kernel counts its own kills "
        "for the whole machine, which all these hosts share.",
        "",
        "| limit | measured | |",
        "|---|---|---|",
        *(
            f"| {bar.text} | {bar.seen} | {'met' if bar.met else '**missed**'} |"
            for bar in bars(records)
        ),
        "",
        "## By strike",
        "",
        *_table("strike", {WORDS[s]: [r for r in records if r.plan.strike == s] for s in WORDS}),
        "",
        "## By launcher",
        "",
        *_table("launcher", {e: [r for r in records if r.plan.launcher == e] for e in LAUNCHERS}),
        f"| all | {' | '.join(map(str, count(records)))} |",
        "",
        "## Runs that broke a promise",
        "",
    ]
    failed = [record for record in records if record.judgement.failed]
    if not failed:
        return "\n".join([*out, "None."]) + "\n"
    out += ['`make chaos ARGS="--only NUMBER"` repeats one.', "", "| run | plan | what |"]
    out += ["|---|---|---|"]
    for record in failed:
        what = "; ".join(faults_of(record))
        out.append(f"| {record.plan.number} | {_cell(str(record.plan))} | {_cell(what)} |")
    return "\n".join(out) + "\n"


def faults_of(record: Record) -> list[str]:
    """Everything that was wrong with a run, with its kind."""
    judged = record.judgement
    kinds = {"late": judged.late, "false blame": judged.blamed, "lie": judged.lies}
    kinds |= {"traceback": judged.tracebacks, "left": judged.leftovers}
    return [f"{kind}: {text}" for kind, texts in kinds.items() for text in texts]


def _versions(record: Record) -> str:
    named = {"nccl-doctor": "nccl-doctor", "torch": "torch", "python": "Python"}
    return ", ".join(f"{named[name]} {text}" for name, text in record.versions.items())


def _table(head: str, groups: dict[str, list[Record]]) -> list[str]:
    rows = [f"| {head} | {' | '.join(HEAD)} |", "|" + "---|" * (1 + len(HEAD))]
    for name, records in groups.items():
        rows.append(f"| {name} | {' | '.join(map(str, count(records)))} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Running ------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"chaos: {message}\n")


def _number(text: str, least: int = 0) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not least <= number <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {MOST}")
    return number


def _patience(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 1 <= factor <= 20:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 20")
    return factor


def main(words: Sequence[str] | None = None) -> int:
    """Make the runs that are missing; returns the exit code."""
    positive = partial(_number, least=1)
    parser = _Parser(prog="chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=_number, default=WANTED, help="how many (default: 1000)")
    parser.add_argument("--from", dest="first", type=_number, default=0, help="the first number")
    parser.add_argument("--only", type=_number, nargs="+", help="these numbers, again")
    parser.add_argument("--seed", type=_number, default=SEED)
    parser.add_argument("--jobs", type=positive, default=2, help="labs side by side (default: 2)")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file with one line per run")
    parser.add_argument("--patience", type=_patience, default=1.0, help="factor of all time-outs")
    parser.add_argument("--write", type=Path, help="page to write")
    args = parser.parse_args(words)
    try:
        args.records.parent.mkdir(parents=True, exist_ok=True)
        records = Records(args.records, args.seed)
    except (OSError, ValueError) as error:
        parser.error(f"--records: {error}")
    numbers = args.only or records.missing(range(args.first, args.first + args.runs))
    if numbers and (reason := trouble()):
        print(f"chaos: {reason}", file=sys.stderr)
        return 1
    broken = _make(numbers, records, args)
    if args.write and records.all:
        args.write.write_text(page(records.all, args.seed), encoding="utf-8")
    met = bars(records.all)
    for bar in met:
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.text}: {bar.seen}")
    return 0 if all(bar.met for bar in met) and not broken else 1


def _make(numbers: Sequence[int], records: Records, args: argparse.Namespace) -> int:
    """Make runs side by side; returns the number of those in which the lab itself failed."""

    def one(number: int) -> int:
        made = plan(args.seed, number)
        try:
            record = run(made, args.records.parent, args.patience)
        except LabError as error:
            print(f"{number} {made}: no run, the lab failed: {error}", flush=True)
            return 1
        records.add(record)
        _show(record)
        return 0

    with ThreadPoolExecutor(args.jobs) as pool:
        return sum(pool.map(one, numbers))


def _show(record: Record) -> None:
    mark = "WRONG" if record.judgement.failed else "right"
    if record.judgement.unknown:
        mark += ", unknown"
    struck = record.what if record.struck else record.what or "not struck"
    said = "; ".join(record.causes) or ", ".join(sorted(set(record.verdicts.values()))) or "nothing"
    print(f"{record.plan.number} {mark} {record.seconds:.1f} s  {record.plan}  {struck}  {said}")
    for text in faults_of(record):
        print(f"    {text}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
