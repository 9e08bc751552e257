"""How many rounds and tests does isolation need, and does it name the right place? No network.

Clusters of 4 to 10,000 hosts are made up, with faulty hosts, faulty links and faults of size at
random places; the planner (`nccl_doctor.checks.collectives.planner`) is asked for one round after
the other, and the made-up cluster answers. Writes a page with the results.

    python benchmarks/isolation.py --write docs/isolation.md

Exit code 0 where the bar is met, else 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nccl_doctor.checks.collectives.bisection import Result, Units
from nccl_doctor.checks.collectives.planner import Plan, Seen, Verdict, next_round, verdict_so_far
from nccl_doctor.model.findings import Confidence

BAR_HOSTS = 1024
BAR_ROUNDS = 12
SIZES = (4, 7, 16, 61, 256, 1024, 10_000)
FAULTS = {
    "one host": (1, 0),
    "one link": (0, 1),
    "two hosts": (2, 0),
    "two links": (0, 2),
    "a host and a link": (1, 1),
    "three of either": (2, 1),
}


@dataclass
class MadeUp:
    """A cluster that answers tests.

    Attributes:
        hosts: seats of each host.
        dead: hosts (by index) that fail alone.
        cut_off: hosts that are good alone and fail with everybody else.
        links: pairs of hosts that do not work together.
        most: a group of more seats than this fails, whoever they are; None for no such limit.
        stuck: seats that fail wherever they are.
        passed_bytes: what a group that fails has finished before.
    """

    hosts: Sequence[tuple[int, ...]]
    dead: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()
    links: frozenset[frozenset[int]] = frozenset()
    most: int | None = None
    stuck: frozenset[int] = frozenset()
    passed_bytes: int = 0
    host_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the seats."""
        self.host_of = {seat: i for i, host in enumerate(self.hosts) for seat in host}

    def meet(self, group: Units) -> Seen:
        """What one test gives."""
        hosts = {self.host_of[seat] for seat in group}
        bad = (
            not self.dead.isdisjoint(hosts)
            or (len(hosts) > 1 and not self.cut_off.isdisjoint(hosts))
            or any(link <= hosts for link in self.links)
            or (self.most is not None and len(group) > self.most)
            or not self.stuck.isdisjoint(group)
        )
        return Seen(Result.BAD, self.passed_bytes) if bad else Seen(Result.GOOD)

    @property
    def truth(self) -> set[frozenset[Units]]:
        """Places as a verdict names them."""
        return {frozenset({frozenset(self.hosts[h])}) for h in self.dead | self.cut_off} | {
            frozenset(frozenset(self.hosts[h]) for h in link) for link in self.links
        }


@dataclass(frozen=True)
class Story:
    """One search from its start to its end; rounds begin with the one after the first failure."""

    history: tuple[Mapping[Units, Seen], ...]
    verdict: Verdict

    @property
    def rounds(self) -> int:
        """Rounds in all."""
        return len(self.history) - 1

    @property
    def tests(self) -> int:
        """Groups of hosts that were tried; each host by itself is not counted."""
        return sum(len(held) for held in self.history[2:])

    @property
    def named(self) -> set[frozenset[Units]]:
        """The places that were named."""
        return {frozenset(culprit.places) for culprit in self.verdict.culprits}


def tell(cluster: MadeUp) -> Story:
    """Ask the planner until it has a verdict."""
    history: list[Mapping[Units, Seen]] = []
    while isinstance(step := next_round(cluster.hosts, history), Plan):
        history.append({group: cluster.meet(group) for group in step.groups})
    return Story(tuple(history), step)


def rounds_to_name(cluster: MadeUp, story: Story) -> int:
    """After how many rounds the verdict so far names just the right places, and goes on to."""
    count = story.rounds
    while count and _is_named(verdict_so_far(cluster.hosts, story.history[:count]), cluster):
        count -= 1
    return count


def _is_named(verdict: Verdict, cluster: MadeUp) -> bool:
    named = {frozenset(culprit.places) for culprit in verdict.culprits}
    sure = all(culprit.confidence is Confidence.CERTAIN for culprit in verdict.culprits)
    return sure and named == cluster.truth


def random_cluster(rng: random.Random, count: int, bad_hosts: int, bad_links: int) -> MadeUp:
    """Hosts of one rank; no two links meet, so that they are not the same as one bad host."""
    picked = rng.sample(range(count), bad_hosts + 2 * bad_links)
    hosts, ends = picked[:bad_hosts], picked[bad_hosts:]
    dead = frozenset(host for host in hosts if host % 2)
    return MadeUp(
        hosts=[(seat,) for seat in range(count)],
        dead=dead,
        cut_off=frozenset(hosts) - dead,
        links=frozenset(map(frozenset, zip(ends[::2], ends[1::2], strict=True))),
    )


@dataclass(frozen=True)
class Row:
    """Many made-up clusters of one size with one kind of fault."""

    hosts: int
    fault: str
    runs: int
    exact: int
    named: int
    rounds: int
    tests: int

    def __str__(self) -> str:
        """As a line of the table."""
        pairs = self.hosts * (self.hosts - 1) // 2
        cells = (
            f"{self.hosts:,}",
            self.fault,
            f"{self.exact} of {self.runs}",
            self.named,
            self.rounds,
            f"{self.tests:,}",
            f"{pairs:,}",
        )
        return f"| {' | '.join(map(str, cells))} |"


def measure(count: int, fault: str, runs: int) -> Row:
    """Try a kind of fault at random places; the seed is the place in the table."""
    told = []
    for run in range(runs):
        rng = random.Random(f"{count} {fault} {run}")
        cluster = random_cluster(rng, count, *FAULTS[fault])
        story = tell(cluster)
        exact = _is_named(story.verdict, cluster) and not story.verdict.untold
        told.append((exact, rounds_to_name(cluster, story), story.rounds, story.tests))
    exact, named, rounds, tests = zip(*told, strict=True)
    return Row(count, fault, runs, sum(exact), max(named), max(rounds), max(tests))


def measure_size(count: int, most: int) -> tuple[int, bool]:
    """A fault of size. Returns: rounds in all, and whether exactly that size was named."""
    cluster = MadeUp([(seat,) for seat in range(count)], most=most)
    story = tell(cluster)
    size = story.verdict.size
    right = size is not None and (len(size[0]), len(size[1])) == (most, most + 1)
    return story.rounds, right and not story.verdict.culprits


def is_met(rows: Sequence[Row]) -> bool:
    """Whether one fault among 1,024 hosts was named exactly, each time and soon enough."""
    ones = [r for r in rows if r.hosts == BAR_HOSTS and r.fault in ("one host", "one link")]
    return all(r.exact == r.runs and r.named <= BAR_ROUNDS for r in ones)


def page(rows: Sequence[Row], sizes: Sequence[tuple[int, int, int, bool]]) -> str:
    """The page of results, in Markdown."""
    met = "met" if is_met(rows) else "**missed**"
    worst = max(r.named for r in rows if r.hosts == BAR_HOSTS and r.fault.startswith("one "))
    clusters = sum(row.runs for row in rows)
    return _PAGE.format(
        hosts_line=f"{clusters:,} simulated clusters of one rank per host, with faulty hosts (half "
        "of them fail alone, half only with others) and broken links at random places:",
        bar=f"| named exactly, in at most {BAR_ROUNDS} rounds | {worst} rounds | {met} |",
        table="\n".join(map(str, rows)),
        sizes="\n".join(
            f"| {count:,} | {most:,} | {rounds} | {'yes' if right else '**no**'} |"
            for count, most, rounds, right in sizes
        ),
    )


_PAGE = """# Isolation

If the group of all ranks hangs or fails and no rank is seen to be the cause, nccl-doctor finds
the place with smaller groups, in the same run: every round has new processes, and the groups of
one round have no rank in common, so they run at the same time.
`benchmarks/isolation.py` simulates the search and writes this page.

## The scheme

A group is bad if it has a host that works with no other host, or both ends of a broken link. The
search assumes that a fault does not depend on the other members of a group. (Faults that do are
recognised, see below.)

1. **Screen.** Every host alone. If a host fails alone, each of its ranks is tried alone, then the
   ranks are split as hosts are below, so that the rank (or the pair of ranks) is named. At the
   same time the hosts that are good alone are tried together; if they are good, the search ends.
2. **Split.** A bad set is cut in two halves, and both are tried at the same time. A bad half is
   cut again. All bad branches are followed in the same rounds, so two faults in two halves cost
   no more rounds than one.
3. **Cross the boundary.** If both halves A and B are good, a pair across them is bad. A is cut in
   A0 and A1, B in B0 and B1, and A0+B0 and A1+B1 are tried at the same time. If both are good
   too, the pair is in A0×B1 or in A1×B0. These have no host in common, so both are followed at
   the same time, and each is a quarter of A×B. After log2(N) rounds only single pairs are left,
   without a host in common: one more round tries all of them.
4. **Confirm.** Each host that is in a bad pair and was in no good group is tried with a partner
   that was in one. A host is blamed if it fails with two partners that work with others; a link
   is blamed if both of its ends work with others. Often earlier rounds have shown that already.
5. **The others.** Pairs that no group has tried yet (a bad branch leaves the pairs across it open)
   are tried as one group without the hosts and links to blame. If that fails, there is another
   fault, and the search continues there.

If every part is good (or if there are only two hosts), the whole group is tried once more: if it
finishes, the fault is flaky; if it fails again, the search halves the number of ranks until it
knows the number from which groups fail. If a group always finishes small messages and never
larger ones, the finding says so. If no two hosts work together, no host is named.

Neighbours in order of rank stay together in every cut: NCCL's rings connect them, so a broken
link of a ring still fails in the smaller groups. A link of NCCL's trees may not; then no smaller
group fails, which looks like a fault of size, and the finding says that too.
Not validated on hardware.

A round gets 5 times the time that good groups needed so far (at least 3 s, at most
`--collective-timeout`), and more if its groups are larger. The search ends after 30 s or three
times `--collective-timeout`, whichever is longer, and reports what it knows by then.

## Results

{hosts_line}

| limit | measured | |
|---|---|---|
{bar}

Rounds are counted from the first one after the failure, the screen included. *Rounds to name*:
after these the verdict names exactly the right places; *rounds in all*: with the rounds that try
the other hosts without them. Each number is the worst of all runs; "tests" are the groups that
were tried in addition to the screen.

| hosts | faults | named exactly | rounds to name | rounds in all | tests | exhaustive pairs |
|---|---|---|---|---|---|---|
{table}

Groups that fail because they have too many ranks, whichever these are, are distinguished from
faults of hosts and links:

| ranks | works up to | rounds | named exactly |
|---|---|---|---|
{sizes}
"""


def main() -> int:
    """Simulate, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--runs", type=int, default=200, help="clusters of each kind")
    args = parser.parse_args()
    began = time.monotonic()
    rows = []
    for count in SIZES:
        runs = max(2, min(args.runs, args.runs * 256 // count))
        for fault, (hosts, links) in FAULTS.items():
            if count < 4 * (hosts + links) and (hosts, links) not in ((1, 0), (0, 1)):
                continue  # too few are well to tell who is not
            rows.append(measure(count, fault, runs if hosts + links == 1 else max(2, runs // 5)))
            print(rows[-1], flush=True)
    sizes = [(n, k, *measure_size(n, k)) for n in (16, 64, 1024, 10_000) for k in (n // 3, n - 1)]
    text = page(rows, sizes)
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s; the bar is {'met' if is_met(rows) else 'missed'}")
    return 0 if is_met(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
