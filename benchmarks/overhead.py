"""What a run of the doctor costs, against the cheapest job that could prove the same.

On a healthy lab cluster, two commands take turns:

    A   torchrun ... -m nccl_doctor run
    B   torchrun ... a script of init_process_group and one all_reduce

Prints the wall time of both commands of each pair, their ratio, and the median ratio of each size.
From eight hosts on, the doctor also runs with each of two faults: its time as a ratio to that of
the healthy B, and whether it is right. Exit code 0 where each bar is met, else 1.

    python benchmarks/overhead.py --sizes 2x2 --pairs 5
    python benchmarks/overhead.py --sizes 2x2 24x1 32x1 8x4 --pairs 2 --write docs/overhead.md
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

BARS = {(2, 2): 1.15, (24, 1): 0.9}
"""Highest median ratio of a healthy cluster of (hosts, ranks per host)."""
WITH_FAULTS = 8
"""Hosts from which on the faults are tried too."""
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
    """Seconds of one size: of both commands in turns, and of each fault with what was said."""

    hosts: int
    nproc: int
    doctor_s: list[float] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)
    faults: list[tuple[Case, float, bool]] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median of the ratios of the pairs."""
        return statistics.median(
            doctor / bare for doctor, bare in zip(self.doctor_s, self.bare_s, strict=True)
        )

    @property
    def bar(self) -> float | None:
        """Highest ratio allowed; None where there is no bar."""
        return BARS.get((self.hosts, self.nproc))

    @property
    def is_met(self) -> bool:
        """Whether the ratio is within its bar, and every fault was named."""
        return self.ratio <= (self.bar or self.ratio) and all(right for *_, right in self.faults)


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


def measure(hosts: int, nproc: int, pairs: int) -> Measured:
    """Let both commands take turns on a healthy cluster, then try the faults."""
    found = Measured(hosts, nproc)
    with Lab(tuple(f"nd{number}" for number in range(hosts))) as lab:
        lab.fresh = True  # both import torch, as a user's would
        script = lab.folder / "bare.py"
        script.write_text(_BARE)
        doctor = ["-m", "nccl_doctor", "run", "--backend", "gloo", *_OPTIONS]
        # The first start reads torch from the disk; it belongs to neither.
        wall_s(lab, lab.torchrun([str(script)], nproc=nproc))
        print(f"{hosts} x {nproc}\npair  doctor s  bare s  ratio", flush=True)
        for pair in range(pairs):
            found.doctor_s.append(wall_s(lab, lab.torchrun(doctor, nproc=nproc)))
            found.bare_s.append(wall_s(lab, lab.torchrun([str(script)], nproc=nproc)))
            took, bare = found.doctor_s[-1], found.bare_s[-1]
            print(f"{pair + 1:4}  {took:8.2f}  {bare:6.2f}  {took / bare:5.2f}", flush=True)
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
        bar = f"{each.bar}" if each.bar else "–"
        pairs = len(each.doctor_s)
        middle = (statistics.median(each.doctor_s), statistics.median(each.bare_s))
        cells = [f"{each.hosts} × {each.nproc}", f"healthy, {pairs} pairs"]
        cells += [f"{middle[0]:.1f}", f"{middle[1]:.1f}", f"{each.ratio:.2f}", bar]
        rows.append(cells)
        for case, seconds, right in each.faults:
            answer = "right" if right else "**wrong**"
            cells = [cells[0], f"{case.title}: {answer}", f"{seconds:.1f}", f"{middle[1]:.1f}"]
            rows.append([*cells, f"{seconds / middle[1]:.2f}", "–"])
    return "\n".join(
        [
            "# What a run costs",
            "",
            "`nccl-doctor run` under torchrun, compared with torchrun and a script that forms the "
            "default process group and makes one all-reduce. "
            "Written by `benchmarks/overhead.py`; do not edit.",
            f"{day}, nccl-doctor {version('nccl-doctor')}, torch {version('torch')} (gloo, CPU), "
            f"Python {platform.python_version()}.",
            "",
            "All hosts are network namespaces of one machine with two cores, so each start of a "
            "process costs all of them: the seconds are not those of a cluster, the ratios are "
            "nearer to it. Both commands take turns; the ratio is the median over the pairs. With "
            "a fault on one host in the middle, the doctor's time is compared with that of the "
            "healthy script.",
            "",
            "| hosts × ranks | cluster | doctor, s | torchrun, s | ratio | at most |",
            "|---|---|---|---|---|---|",
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
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", type=Path, help="page to write")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: at least one is needed")
    reason = trouble()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    measured = []
    for hosts, nproc in args.sizes:
        measured.append(measure(hosts, nproc, args.pairs))
        bar = f" (bar {measured[-1].bar})" if measured[-1].bar else ""
        print(f"{hosts} x {nproc}: median ratio {measured[-1].ratio:.2f}{bar}", flush=True)
    if args.write:
        args.write.write_text(page(measured), encoding="utf-8")
    return 0 if all(each.is_met for each in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
