"""What a run of the doctor costs, against the cheapest job that could prove the same.

On a healthy lab cluster, three commands take turns:

    torchrun   torchrun ... -m nccl_doctor run
    own        nccl-doctor run --nnodes ..., as `nccl-doctor run -- torchrun ...` does it
    bare       torchrun ... a script of init_process_group and one all_reduce

Prints the wall time of the commands of each turn, the ratios to the last one, and their medians.
From eight hosts on, the doctor also runs under torchrun with each of two faults: its time as a
ratio to that of the healthy script, and whether it is right. Exit code 0 where each bar is met,
else 1.

    python benchmarks/overhead.py --sizes 2x2
    python benchmarks/overhead.py --sizes 2x2 24x1 32x1 8x4 --turns 2 --write docs/overhead.md
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.corpus import Case, Cause
from tests.lab.corpus.inject import prepare
from tests.lab.corpus.score import score
from tests.lab.hosts import trouble
from tests.lab.lab import Lab
from tests.lab.processes import Process

TORCHRUN, OWN = "under torchrun", "in front of torchrun"
"""How the doctor is started. Under torchrun it does all that the script does, and more; its own
launcher starts one process less for each host.
"""
BARS = {(2, 2, TORCHRUN): 1.15, (24, 1, OWN): 0.9}
"""Highest median ratio of a healthy cluster of (hosts, ranks per host), started so."""
WITH_FAULTS = 8
"""Hosts from which on the faults are tried too."""
FEW, TIMES = 4, 5
"""Ranks up to which there are so many times the turns: they take seconds, and vary by a tenth."""
LIMIT_S = 200.0
_OPTIONS = ("--timeout", "150", "--join-timeout", "90", "--collective-timeout", "20")
"""Time for tens of hosts that share two cores."""

_BARE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.ones(1024)
dist.all_reduce(values)
assert values[0].item() == dist.get_world_size()
dist.destroy_process_group()
"""


@dataclass
class Measured:
    """Seconds of one size: of the commands in turns, and of each fault with what was said."""

    hosts: int
    nproc: int
    doctor_s: dict[str, list[float]] = field(default_factory=lambda: {TORCHRUN: [], OWN: []})
    bare_s: list[float] = field(default_factory=list)
    faults: list[tuple[Case, float, bool]] = field(default_factory=list)

    def ratio(self, start: str) -> float:
        """Median of the ratios of the turns, of the doctor that is started so."""
        turns = zip(self.doctor_s[start], self.bare_s, strict=True)
        return statistics.median(doctor / bare for doctor, bare in turns)

    def bar(self, start: str) -> float | None:
        """Highest ratio allowed; None where there is no bar."""
        return BARS.get((self.hosts, self.nproc, start))

    @property
    def is_met(self) -> bool:
        """Whether the ratios are within their bars, and every fault was named."""
        ratios = {start: self.ratio(start) for start in self.doctor_s}
        return all(right for *_, right in self.faults) and all(
            ratio <= (self.bar(start) or ratio) for start, ratio in ratios.items()
        )


def faults_of(hosts: int, nproc: int) -> Iterator[Case]:
    """Two faults, each on one host in the middle of so many."""
    name = f"nd{hosts // 2}"
    kinds: list[tuple[str, Mapping[str, Any], set[str]]] = [
        (
            "a firewall lets in MASTER_PORT only",
            {"do": "drop_ephemeral", "on": name},
            {"peer-one-way", "peer-blocked"},
        ),
        (
            "a misspelt variable of NCCL",
            {"do": "env", "set": {"NCCL_SOKET_IFNAME": "eth0"}, "on": name},
            {"env-unknown-variable"},
        ),
    ]
    for title, step, codes in kinds:
        expect = (Cause(frozenset(codes), frozenset([name])),)
        yield Case("", title, hosts=hosts, nproc=nproc, inject=(step,), expect=expect)


def wall_s(lab: Lab, processes: list[Process]) -> float:
    """Wall time of one torchrun on all hosts, in seconds.

    Raises:
        SystemExit: it failed; a broken run has no speed.
    """
    in_time = lab.wait(processes, LIMIT_S)
    if not in_time or any(process.returncode for process in processes):
        for process in processes:
            print(process.host.name, process.returncode, process.stdout, process.stderr)
        sys.exit(1)
    return max(process.seconds or 0.0 for process in processes)


def own_s(lab: Lab, nproc: int) -> float:
    """Wall time of the doctor with its own launcher on all hosts, in seconds.

    Raises:
        SystemExit: it failed.
    """
    run = lab.own_doctor(*_OPTIONS, nproc=nproc, timeout_s=LIMIT_S)
    if any(run.codes):
        sys.exit(str(run))
    return max(done.seconds for done in run.done)


def measure(hosts: int, nproc: int, turns: int) -> Measured:
    """Let the commands take turns on a healthy cluster, then try the faults."""
    found = Measured(hosts, nproc)
    with Lab(tuple(f"nd{number}" for number in range(hosts))) as lab:
        lab.fresh = True  # both import torch, as a user's would
        script = lab.folder / "bare.py"
        script.write_text(_BARE)
        doctor = ["-m", "nccl_doctor", "run", "--backend", "gloo", *_OPTIONS]
        # The first start reads torch from the disk; it belongs to neither.
        wall_s(lab, lab.torchrun([str(script)], nproc=nproc))
        print(f"{hosts} x {nproc}\nturn  torchrun s  own s  bare s  ratios", flush=True)
        for turn in range(turns * (TIMES if hosts * nproc <= FEW else 1)):
            under = wall_s(lab, lab.torchrun(doctor, nproc=nproc))
            own = own_s(lab, nproc)
            bare = wall_s(lab, lab.torchrun([str(script)], nproc=nproc))
            found.doctor_s[TORCHRUN].append(under)
            found.doctor_s[OWN].append(own)
            found.bare_s.append(bare)
            print(
                f"{turn + 1:4}  {under:10.2f}  {own:5.2f}  {bare:6.2f}  {under / bare:.2f}, "
                f"{own / bare:.2f}",
                flush=True,
            )
    for case in faults_of(hosts, nproc) if hosts >= WITH_FAULTS else ():
        with Lab(case.names) as lab:
            lab.fresh = True
            scene = prepare(case, lab)
            run = lab.torchrun_doctor(
                *_OPTIONS,
                nproc=nproc,
                timeout_s=LIMIT_S,
                per_host=scene.flags,
                per_host_env=scene.env,
            )
            seconds = max(each.seconds for each in run.done)
            said = score(case, run.report)
            found.faults.append((case, seconds, said.is_right))
            print(
                f"{seconds:.2f} s  {case.title}: {'right' if said.is_right else said}", flush=True
            )
    return found


def page(measured: Sequence[Measured]) -> str:
    """The page in Markdown."""
    day = datetime.now(timezone.utc).date().isoformat()
    rows = []
    for each in measured:
        size, bare = f"{each.hosts} × {each.nproc}", statistics.median(each.bare_s)
        for start, doctor_s in each.doctor_s.items():
            turns = f"{len(doctor_s)} turn{'s' if len(doctor_s) > 1 else ''}"
            cells = [size, f"healthy, {turns}", start]
            cells += [f"{statistics.median(doctor_s):.1f}", f"{bare:.1f}"]
            rows.append([*cells, f"{each.ratio(start):.2f}", f"{each.bar(start) or '–'}"])
        for case, seconds, right in each.faults:
            answer = "right" if right else "**wrong**"
            cells = [size, f"{case.title}: {answer}", TORCHRUN, f"{seconds:.1f}", f"{bare:.1f}"]
            rows.append([*cells, f"{seconds / bare:.2f}", "–"])
    return "\n".join(
        [
            "# What a run costs",
            "",
            "`nccl-doctor run`, compared with torchrun and a script that forms the default process "
            "group and makes one all-reduce. Written by `benchmarks/overhead.py`; do not edit.",
            f"{day}, nccl-doctor {version('nccl-doctor')}, torch {version('torch')} (gloo, CPU), "
            f"Python {platform.python_version()}.",
            "",
            "All hosts are network namespaces of one machine with two cores, so each start of a "
            "process costs all of them: the seconds are not those of a cluster, the ratios are "
            "nearer to it. The commands take turns; the ratio is the median over the turns. "
            "Under torchrun (`torchrun … -m nccl_doctor run`) the doctor does all that the script "
            "does, and more, so that the ratio is never below 1. In front of torchrun "
            "(`nccl-doctor run -- torchrun …`) it starts its ranks itself, and torchrun's own "
            "process on each host, which imports torch too, comes only with the job. With a fault "
            "on one host in the middle, the doctor's time is compared with that of the healthy "
            "script.",
            "",
            "| hosts × ranks | cluster | doctor | s | torchrun, s | ratio | at most |",
            "|---|---|---|---|---|---|---|",
            *(f"| {' | '.join(cells)} |" for cells in rows),
            "",
        ]
    )


def _size(text: str) -> tuple[int, int]:
    if not re.fullmatch("[1-9][0-9]?x[1-9][0-9]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOSTSxRANKS, as in 24x1")
    hosts, nproc = text.split("x")
    return int(hosts), int(nproc)


def main() -> int:
    """Measure each size; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=_size, nargs="+", default=[(2, 2)], metavar="HOSTSxRANKS")
    words = f"turns of each size; {TIMES} times as many up to {FEW} ranks"
    parser.add_argument("--turns", type=int, default=2, help=words)
    parser.add_argument("--write", type=Path, help="page to write")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error(f"--turns {args.turns}: at least one is needed")
    reason = trouble()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    measured = []
    for hosts, nproc in args.sizes:
        found = measure(hosts, nproc, args.turns)
        measured.append(found)
        for start in found.doctor_s:
            bar = f" (bar {found.bar(start)})" if found.bar(start) else ""
            print(f"{hosts} x {nproc} {start}: ratio {found.ratio(start):.2f}{bar}", flush=True)
    if args.write:
        args.write.write_text(page(measured), encoding="utf-8")
    return 0 if all(each.is_met for each in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
