"""How long do judging and rendering take at size, and how large is what they write? No network.

Clusters of eight ranks to a host are made up (`tests/support/many_hosts.py`), judged, rendered in
every format and redacted. Each row has a process of its own, as memory is never given back.

    python benchmarks/judge.py --hosts 64 256 1024 2048

Exit code 0 where the bars of 2,048 hosts are met, else 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import RunRecord
from nccl_doctor.registry import installed
from nccl_doctor.report import text
from nccl_doctor.report.formats import html, junit, markdown, prometheus
from nccl_doctor.report.redaction import redact
from nccl_doctor.toolkit.garbage import collected_rarely
from tests.support.many_hosts import Faults, checks, many_hosts, met

SIZES = (64, 256, 1024, 2048)
JUDGED_S, JUDGED_MIB, HTML_MB, REDACTED_MB_S = 10.0, 1024, 5.0, 10.0
"""Bars at 2,048 hosts; a megabyte of HTML is 10^6 bytes."""
SCREEN = 60
"""Lines of text, whatever is wrong."""
FAULTS: dict[str, Callable[[int], Faults]] = {
    "healthy": lambda count: Faults(),
    "one host silent": lambda count: Faults(silent=frozenset({count // 2})),
    "one link cut": lambda count: Faults(cut=frozenset({frozenset(met(count)[count // 3])})),
    "1 % of hosts with another variable": lambda count: Faults(odd=frozenset(range(5, count, 100))),
    "one slow link": lambda count: Faults(slow=frozenset({frozenset(met(count)[count // 3])})),
    "a third of the hosts lets nobody in": lambda count: Faults(deaf=frozenset(range(0, count, 3))),
}


def measure(count: int, fault: str) -> dict[str, Any]:
    """Seconds of CPU, bytes and lines, in this process; memory is the most that it ever had."""
    cluster = many_hosts(count, FAULTS[fault](count))
    gc.collect()
    gc.freeze()  # as the process that judges in a run
    held = _mib()
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        made = work()
        seconds[name] = round(time.process_time() - began, 2)
        return made

    report = timed("judge", lambda: conclude(cluster, checks(), run=RunRecord(id="0" * 16)))
    judged = _mib()
    screen = timed("text", lambda: text.render(report, checks=installed))
    written = {
        "html": timed("html", lambda: html.render(report, installed)),
        "junit": timed("junit", lambda: junit.render(report)),
        "markdown": timed("markdown", lambda: markdown.render(report)),
        "prometheus": timed("prometheus", lambda: prometheus.render(report)),
    }
    timed("redact", lambda: redact(report, b"0" * 32))
    whole = sum(len(json.dumps(part)) for part in _parts(report))
    return {
        "verdict": report.verdict,
        "causes": sorted({cause.code for cause in report.root_causes}),
        "facts_mib": held,
        "judged_mib": judged,
        "seconds": seconds,
        "lines": screen.count("\n"),
        "bytes": {name: len(made.encode()) for name, made in written.items()},
        "redacted_mb_s": round(whole / 1e6 / max(seconds["redact"], 0.01), 1),
    }


def _parts(report: Any) -> Any:
    """The report as JSON, host by host: all at once it would be the largest thing in memory."""
    data = report.to_json()
    yield {key: value for key, value in data.items() if key not in ("hosts", "ranks")}
    yield from data["hosts"]
    yield from data["ranks"]


def _mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def is_met(count: int, row: dict[str, Any]) -> bool:
    """Whether a row meets the bars: those of sizes at any number of hosts."""
    small = row["lines"] <= SCREEN and row["bytes"]["html"] <= HTML_MB * 1e6
    if count < max(SIZES):
        return small
    quick = row["seconds"]["judge"] <= JUDGED_S and row["redacted_mb_s"] >= REDACTED_MB_S
    return small and quick and row["judged_mib"] <= JUDGED_MIB


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=SIZES)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        with collected_rarely():  # as every command of the program
            print(json.dumps(measure(int(args.one[0]), args.one[1])))
        return 0
    good = True
    head = "hosts judge_s facts_MiB with_judge_MiB lines html_B junit_B md_B redact_MB/s  fault"
    print(head, flush=True)
    for count in args.hosts:
        for fault in args.fault:
            command = [sys.executable, __file__, "--one", str(count), fault]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            met_here = is_met(count, row)
            good = good and met_here
            sizes = row["bytes"]
            print(
                f"{count:5} {row['seconds']['judge']:7.2f} {row['facts_mib']:9} "
                f"{row['judged_mib']:14} {row['lines']:5} {sizes['html']:6} {sizes['junit']:7} "
                f"{sizes['markdown']:4} {row['redacted_mb_s']:11}  {fault}: {row['verdict']} "
                f"({', '.join(row['causes']) or 'nothing'}){'' if met_here else ': MISSED'}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
