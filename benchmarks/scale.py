"""What does the examination of thousands of ranks cost, and does it name the right place?

Rank 0 is the program itself, with its store; all others are played (tests/lab/crowd) on the same
machine, with the program's own client and a connection each. They say what a run of two hosts in
the lab saw, which is recorded first. So the time is that of sign-in, rounds, batches, judging and
writing: what the checks themselves take is not in it.

    python benchmarks/scale.py --ranks 64,1024 --cases healthy,cut
    python benchmarks/scale.py --write docs/scale.md

A run that is too slow is made again, and the quicker one counts: what other programs on the machine
take can only add to the seconds. A wrong verdict stays wrong.

Exit code 0 where every bar is met, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.crowd import CASES, GUN, Plan, name_of
from tests.lab.hosts import trouble
from tests.lab.lab import Lab
from tests.lab.processes import LabError, Process

ROOT = Path(__file__).resolve().parents[1]
SIZES = (64, 256, 1024, 4096, 16_384)
PER_HOST = 8
BARS = {1024: 10.0, 16_384: 60.0}
"""Ranks → most seconds to a verdict, without the time limits of who does not come or answer."""
MOST_MEMORY = 1 << 30
READY_S, LIMIT_S = 400.0, 560.0
_PLAYED = 2048
"""Most participants of one process."""
_MB = 1e-6
_PATIENT = ("--join-timeout", "120", "--timeout", "300", "--collective-timeout", "60")
_ROUND = re.compile(r"[a-z_]+: ")
"""Begin of a step in which a round is held."""
_TITLES = {
    "healthy": "healthy",
    "silent": "one host never comes",
    "frozen": "one host stops in the middle",
    "cut": "one link is cut",
    "variable": "1 % of the hosts have another variable",
}


@dataclass(frozen=True)
class Row:
    """One run, and what became of it."""

    plan: Plan
    head: dict[str, Any]
    players: list[dict[str, Any]]
    slower: tuple[float, ...] = ()
    """Seconds to the verdict in slower runs of the same."""

    @property
    def seconds(self) -> float:
        """Seconds to the verdict on stdout, without the time limits that ran out."""
        return self._until(VERDICT)

    @property
    def written(self) -> float:
        """Seconds to the whole report as JSON, without them."""
        return self._until(LEAVING)

    def _until(self, step: str) -> float:
        began = next(at for at, _, what in self.head["steps"] if what == step)
        return float(began - self.head["waited_s"])

    @property
    def received(self) -> int:
        """Bytes that the store's host received from all others."""
        return sum(each["sent"] for each in self.players)

    @property
    def told(self) -> int:
        """Bytes that all others received from there."""
        return sum(each["received"] for each in self.players)

    @property
    def wrong(self) -> list[str]:
        """What is not as it should be."""
        plan = self.plan
        problems = [text for each in self.players for text in each["problems"].values()]
        gone = plan.per_host * len((*plan.frozen, *plan.silent))
        ended = sum(each["ended"] for each in self.players)
        found = sorted(set(problems))[:3]
        if ended != plan.ranks - 1 - gone:
            found.append(f"{ended} of {plan.ranks - 1 - gone} others read the end")
        return found + list(self._wrong_words())

    def _wrong_words(self) -> Iterator[str]:
        bad = [each for each in self.head["roots"] if each["severity"] != "info"]
        told = {each["code"]: each["where"] for each in bad}
        code, where = expected(self.plan)
        if sorted(told) != ([code] if code else []):
            yield f"names {', '.join(told) or 'nothing'}"
            return
        for field, place in where.items():
            said = [list(each) if isinstance(each, tuple) else each for each in told[code][field]]
            if field == "links":
                ends = {frozenset(link) for link in said}
                hosts = set().union(*ends) if ends else set()
                if len(ends) != 1 or name_of(self.plan.cut or 0) not in hosts:
                    yield f"{code} at {said}"
            elif said != place:
                yield f"{code} at {field} {said}"

    @property
    def _slower(self) -> str:
        return f" (slower: {', '.join(f'{each:.1f}' for each in self.slower)})" * bool(self.slower)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        head = self.head
        return (
            f"{self.plan.ranks:,}",
            f"{self.plan.hosts:,}",
            _TITLES[self.plan.case],
            "wrong: " + "; ".join(self.wrong) if self.wrong else "right",
            f"{self.seconds:.1f}{self._slower}",
            f"{self.written:.1f}",
            f"{head['cpu_s']:.1f}",
            f"{head.get('store_cpu_s', 0.0):.1f}",
            f"{head['peak'] / 2**20:,.0f}",
            f"{self.received * _MB:,.1f}",
            f"{self.told * _MB:,.1f}",
        )


PARTS = ("sign-in", "rounds", "judging", "writing", "leaving")
"""Parts of a run on rank 0, in their order."""
VERDICT, LEAVING = "writing the report", "leaving"
"""Steps that begin once the verdict is printed, and once the report is written."""
_BEGINS = {"judging": "judging", VERDICT: "writing", LEAVING: "leaving"}


def parts_of(head: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Part → seconds, and those of the processor, of rank 0."""
    found = dict.fromkeys(PARTS, (0.0, 0.0))
    end = (head["left_s"], head["left_cpu_s"], "")
    part = "sign-in"
    for (at, cpu, what), (until, cpu_until, _) in itertools.pairwise([*head["steps"], end]):
        part = _BEGINS.get(what, "rounds" if _ROUND.match(what) else part)
        wall, used = found[part]
        found[part] = (wall + until - at, used + cpu_until - cpu)
    return found


HEAD = (
    *("ranks", "hosts", "what is wrong", "verdict", "s to the verdict", "s to the report"),
    *("CPU s of rank 0", "CPU s of the store", "peak MiB of rank 0", "MB received", "MB sent"),
)


def expected(plan: Plan) -> tuple[str, dict[str, list[Any]]]:
    """Code of the only cause that a right report names, and its place; no code if all is well."""
    names = [name_of(host) for host in (*plan.silent, *plan.frozen, *plan.odd)]
    if plan.case == "silent":
        return "host-absent", {"nodes": list(plan.silent)}
    if plan.case == "frozen":
        return "rank-silent", {"hosts": names}
    if plan.case == "cut":
        return "peer-blocked", {"links": []}
    if plan.case == "variable":
        return "env-differs", {"hosts": sorted(names)}
    return "", {}


def record(lab: Lab) -> Path:
    """A healthy run of both hosts, with two ranks each.

    Raises:
        LabError: it did not pass.
    """
    run = lab.plain_doctor(*_PATIENT, nproc=2, timeout_s=READY_S)
    if run.report is None or run.report["verdict"] not in ("pass", "warn"):
        raise LabError(f"the recorded run did not pass:\n{run}")
    return run.folder / "report.json"


def examine(lab: Lab, recording: Path, ranks: int, case: str, *, keep: Path | None) -> Row:
    """Examine a crowd.

    Raises:
        LabError: it came to no end.
    """
    folder = lab.new_folder()
    plan = Plan.of(ranks, PER_HOST, case, folder)
    path = plan.write()
    host, env = lab["nd0"], {"PYTHONPATH": str(ROOT)}
    outs = [folder / "head"]
    processes = [_start(host, env, "head", path, recording, outs[0])]
    count = max(2, math.ceil(ranks / _PLAYED))
    for number in range(count):
        outs.append(folder / f"players{number}")
        first, end = (ranks * each // count for each in (number, number + 1))
        processes.append(_start(host, env, "players", path, recording, first, end, outs[-1]))
    _wait_for([Path(f"{out}.ready") for out in outs], processes)
    (folder / GUN).touch()
    in_time = lab.wait(processes, LIMIT_S)
    if keep is not None and (folder / "head.txt").exists():
        (keep / f"{ranks}-{case}.txt").write_text((folder / "head.txt").read_text())
    if not in_time or not all(out.exists() for out in outs):
        words = "\n".join(process.stderr[-2000:] for process in processes)
        raise LabError(f"{ranks} ranks, {case}: no end within {LIMIT_S:g} s\n{words}")
    head, *players = (json.loads(out.read_text()) for out in outs)
    return Row(plan, head, players)


def _kept(keep: Path, ranks: int, case: str) -> Path:
    return keep / f"{ranks}-{case}.json"


def save(keep: Path | None, row: Row) -> Row:
    """The run, which is now in that folder, if there is one."""
    if keep is not None:
        _kept(keep, row.plan.ranks, row.plan.case).write_text(json.dumps(asdict(row)))
    return row


def earlier(keep: Path | None, ranks: int, case: str) -> Row | None:
    """What an earlier run left in a folder."""
    if keep is None or not _kept(keep, ranks, case).exists():
        return None
    row = json.loads(_kept(keep, ranks, case).read_text())
    plan = Plan.from_json(row["plan"])
    return Row(plan, row["head"], row["players"], tuple(row.get("slower", ())))


def _start(host: Any, env: dict[str, str], module: str, *args: object) -> Process:
    argv = [sys.executable, "-m", f"tests.lab.crowd.{module}", *map(str, args)]
    return host.run(argv, env)  # type: ignore[no-any-return]


def _wait_for(files: Sequence[Path], processes: Sequence[Process]) -> None:
    until = time.monotonic() + READY_S
    while not all(file.exists() for file in files):
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > until:
            words = "\n".join(process.stderr[-2000:] for process in ended or processes)
            raise LabError(f"not ready\n{words}")
        time.sleep(0.05)


def table(rows: Sequence[Row]) -> str:
    """The runs as a table of Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parts_table(rows: Sequence[Row]) -> str:
    """What each part of the healthy runs cost rank 0, as a table of Markdown."""
    head = ("ranks", "rounds", *(f"{part}, s (CPU s)" for part in PARTS))
    lines = [head, ("---",) * len(head)]
    for row in rows:
        if row.plan.case == "healthy":
            rounds = {what.split(" (")[0].split(",")[0] for _, _, what in row.head["steps"]}
            count = sum(_ROUND.match(each) is not None for each in rounds)
            cells = (f"{wall:.1f} ({used:.1f})" for wall, used in parts_of(row.head).values())
            lines.append((f"{row.plan.ranks:,}", str(count), *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def missed(rows: Sequence[Row]) -> list[str]:
    """The bars that are not met, one line each."""
    found = []
    for row in rows:
        name = f"{row.plan.ranks:,} ranks, {_TITLES[row.plan.case]}"
        if row.wrong:
            found.append(f"{name}: {'; '.join(row.wrong)}")
        if row.seconds > _limit(row):
            found.append(f"{name}: {row.seconds:.1f} s, more than {_limit(row):g}")
        if row.head["peak"] > MOST_MEMORY:
            found.append(f"{name}: rank 0 took {row.head['peak'] / 2**20:,.0f} MiB")
    for small, large, most in _steps(rows):
        for what in ("seconds", "received", "told"):
            grew = getattr(large, what) / getattr(small, what)
            if grew > most:
                words = f"{what} grew {grew:.1f} times from {small.plan.ranks:,} ranks"
                found.append(f"{large.plan.ranks:,} ranks: {words}, more than N log N ({most:.1f})")
    return found


def _limit(row: Row) -> float:
    """Most seconds to a verdict."""
    return BARS.get(row.plan.ranks, math.inf)


def _steps(rows: Sequence[Row]) -> Iterator[tuple[Row, Row, float]]:
    """(smaller, larger, how much more the larger may need) of the healthy runs."""
    healthy = [row for row in rows if row.plan.case == "healthy"]
    for small, large in itertools.pairwise(healthy):
        ratio = large.plan.ranks / small.plan.ranks
        yield small, large, ratio * math.log2(large.plan.ranks) / math.log2(small.plan.ranks)


def too_slow(rows: Sequence[Row]) -> list[Row]:
    """Runs that took longer than they may."""
    grew = [large for small, large, most in _steps(rows) if large.seconds > most * small.seconds]
    slow = [row for row in rows if row.seconds > _limit(row)]
    return [row for row in rows if not row.wrong and any(row is each for each in (*slow, *grew))]


def quicker(first: Row, again: Row) -> Row:
    """The run that counts, of two of the same: a wrong one, else the quicker one."""
    if again.wrong or again.seconds < first.seconds:
        return replace(again, slower=(*first.slower, first.seconds))
    return replace(first, slower=(*first.slower, again.seconds))


def main() -> int:
    """Run the crowds; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default=",".join(map(str, SIZES)), help="sizes, with commas")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas")
    parser.add_argument("--turns", type=int, default=2, help="most runs of a case that is too slow")
    parser.add_argument("--keep", type=Path, help="folder for results, which are not made again")
    parser.add_argument("--recording", type=Path, help="recording.json of an earlier --keep")
    parser.add_argument("--write", type=Path, help="write the page here")
    args = parser.parse_args()
    if reason := trouble():
        print(reason, file=sys.stderr)
        return 1
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[int, str], Row] = {}
    with Lab(("nd0", "nd1")) as lab:
        recording = args.recording or record(lab)
        if args.keep is not None and args.recording is None:
            (args.keep / "recording.json").write_bytes(recording.read_bytes())
        for ranks, case in itertools.product(
            map(int, args.ranks.split(",")), args.cases.split(",")
        ):
            row = earlier(args.keep, ranks, case)
            runs[ranks, case] = row or save(
                args.keep, examine(lab, recording, ranks, case, keep=args.keep)
            )
            print(f"| {' | '.join(runs[ranks, case].cells)} |", flush=True)
        for _ in range(1, args.turns):
            for row in too_slow(list(runs.values())):
                at = row.plan.ranks, row.plan.case
                again = examine(lab, recording, *at, keep=args.keep)
                runs[at] = save(args.keep, quicker(row, again))
                print(f"| {' | '.join(runs[at].cells)} |", flush=True)
    rows = list(runs.values())
    problems = missed(rows)
    print("\n".join(problems) or "every bar is met")
    if args.write is not None:
        args.write.write_text(page(rows, problems))
    return 1 if problems else 0


def page(rows: Sequence[Row], problems: Sequence[str]) -> str:
    """The page of all runs."""
    bars = (
        "Every bar is met."
        if not problems
        else "Not met:\n\n" + "\n".join(f"- {problem}" for problem in problems)
    )
    return _PAGE.format(table=table(rows), parts=parts_table(rows), bars=bars, cores=os.cpu_count())


_PAGE = """\
# Scale

What sign-in, rounds, batches, judging and writing cost on rank 0, and whether the right place is
named. `benchmarks/scale.py` measures it and writes this page.
What to start a run with, by the number of hosts: [engines.md](engines.md).

## How it is measured

Rank 0 is the program itself: it serves the store, conducts the run, judges, and writes the report.
All other ranks are played by a few processes on the same machine, with the program's own client and
one connection for each rank; what the ranks of a host say to their agent stays on the host, and
is not played. Letters that no order can change are made before the start, as each host of a cluster
makes its own. They say what the hosts of a healthy run of 2 × 2 ranks said, each with its own name,
address and times. What the checks themselves take is not in the seconds, nor is the time limit for
a host that never comes or no longer answers. All of it shares {cores} processor cores, so the
seconds hold what thousands of hosts would do at the same time; the processor time of rank 0 and of
its store stands beside them.

A run that was too slow was made again, as other programs on the machine can only add to the
seconds; those of the slower one stand beside the quicker one.

The bars: a verdict on 1,024 ranks within 10 s, on 16,384 within 60 s and 1 GiB; no more than
N log N; each fault named with its place, and nothing else.

## Results

{table}

*s to the verdict* are until stdout says what is wrong, and where; *s to the report*, until the JSON
file is written, too. *MB received* and *MB sent* are those of the store's host, from and to all
others.

{bars}

## What costs rank 0 most

{parts}

*Sign-in* is from its end of looking at its own host to the list of all seats; *rounds* are orders,
reading the batches of all, and planning and judging between them; *judging* is until the verdict is
printed.

From 128 ranks on, the ranks of a host have one agent, in a star over one store: a process on
the host signs in for them, and posts their answers of a round as one batch. The ranks of rank 0's
host, which are nearest to the store, answer by themselves.
Each agent lets the store wait for the next order, and is told of it at once.
"""


if __name__ == "__main__":
    sys.exit(main())
