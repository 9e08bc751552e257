"""What a run of the doctor costs, against the cheapest job that could prove the same.

On a healthy lab cluster of 2 hosts x 2 ranks, two commands take turns:

    A   torchrun ... -m nccl_doctor run
    B   torchrun ... a script of init_process_group and one all_reduce

Prints the wall time of both commands of each pair, their ratio, and the median ratio. Exit code 0
where that is at most the bar, else 1.

    python benchmarks/overhead.py --pairs 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.hosts import trouble
from tests.lab.lab import Lab
from tests.lab.processes import Process

BAR = 1.5
LIMIT_S = 120.0

_BARE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.ones(1024)
dist.all_reduce(values)
assert values[0].item() == dist.get_world_size()
dist.destroy_process_group()
"""


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


def main() -> int:
    """Run the pairs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2, help="ranks per host")
    args = parser.parse_args()
    reason = trouble()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    ratios = []
    with Lab(("nd0", "nd1")) as lab:
        script = lab.folder / "bare.py"
        script.write_text(_BARE)
        commands = {
            "doctor": ["-m", "nccl_doctor", "run", "--backend", "gloo"],
            "bare": [str(script)],
        }
        # The first start reads torch from the disk; it belongs to neither.
        wall_s(lab, lab.torchrun(commands["bare"], nproc=args.nproc))
        print("pair  doctor s  bare s  ratio")
        for pair in range(args.pairs):
            took = {}
            for name in ("doctor", "bare"):
                took[name] = wall_s(lab, lab.torchrun(commands[name], nproc=args.nproc))
            ratios.append(took["doctor"] / took["bare"])
            print(f"{pair + 1:4}  {took['doctor']:8.2f}  {took['bare']:6.2f}  {ratios[-1]:5.2f}")
    median = statistics.median(ratios)
    print(f"median ratio {median:.2f} (bar {BAR})")
    return 0 if median <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
