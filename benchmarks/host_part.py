"""What it costs to examine one host: every layer up to DEVICE, beyond importing torch.

Two commands take turns:

    A   nccl-doctor env
    B   python -c "import torch.distributed"

Prints the wall time of both commands of each pair, their difference, and the median difference.
Exit code 0 where that is at most the bar, else 1.

    python benchmarks/host_part.py --pairs 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BAR_S = 2.0
LIMIT_S = 60.0


def wall_s(*arguments: str) -> float:
    """Wall time of one Python with these arguments, in seconds.

    Raises:
        SystemExit: it failed; a broken run has no speed.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd="/",
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    took = time.monotonic() - started
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(1)
    return took


def main() -> int:
    """Run the pairs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    commands = {
        "env": ("-m", "nccl_doctor", "env", "--quiet"),
        "torch": ("-c", "import torch.distributed"),
    }
    wall_s(*commands["torch"])  # the first one reads torch from the disk; it belongs to neither
    print("pair  env s  torch s  difference s")
    differences = []
    for pair in range(args.pairs):
        took = {name: wall_s(*command) for name, command in commands.items()}
        differences.append(took["env"] - took["torch"])
        print(f"{pair:4}  {took['env']:5.2f}  {took['torch']:7.2f}  {differences[-1]:12.2f}")
    median = statistics.median(differences)
    met = median <= BAR_S
    print(f"median {median:.2f} s, bar {BAR_S:g} s: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
