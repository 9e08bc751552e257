"""Measure how soon `nccl-doctor run` says something on a terminal, on a busy machine.

Two times of each run, from the start of the process: until the first line, and until the first
certain finding, of a MASTER_ADDR that does not resolve. `--beside FOLDER` measures another checkout
in turn with this one.

    .venv/bin/python benchmarks/first_line.py --runs 20 --busy 2
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("-m", "nccl_doctor", "run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1")
NO_HOST = ("--master-addr", "no-such-host.invalid", "--join-timeout", "5")
CERTAIN = re.compile(rb"so far: \S")
LIMIT_S = 60.0


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep so many processors busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def times_of(root: Path) -> tuple[float, float]:
    """Seconds to the first line, and to the first certain finding."""
    own, its = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(root), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *WORDS, *NO_HOST],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": its},
        cwd=root,
        env=env,
        start_new_session=True,
    )
    os.close(its)
    first, certain, seen = float("inf"), float("inf"), b""
    try:
        while certain == float("inf") and time.monotonic() < began + LIMIT_S:
            if not select.select([own], [], [], 0.5)[0]:
                continue
            seen += os.read(own, 1 << 16)
            now = time.monotonic() - began
            first = min(first, now)
            certain = now if CERTAIN.search(seen) else certain
    except OSError:  # EIO: it has ended
        pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(own)
    return first, certain


def main() -> int:
    """Print the medians and the worst times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--beside", type=Path)
    given = parser.parse_args()
    roots = [ROOT, *([given.beside] if given.beside else [])]
    found: dict[Path, list[tuple[float, float]]] = {root: [] for root in roots}
    with busy(given.busy):
        for _ in range(given.runs):
            for root in roots:
                found[root].append(times_of(root))
    for root, times in found.items():
        which = "this one" if root == ROOT else "beside it"
        print(f"{which}, {len(times)} runs, s (median, worst):")
        firsts, findings = zip(*times, strict=True)
        for name, each in (("first line", firsts), ("certain finding", findings)):
            print(f"  {name:<16} {statistics.median(each):6.2f} {max(each):6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
