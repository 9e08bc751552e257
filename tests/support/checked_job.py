"""A job whose ranks examine the cluster first, from Python, and then do one all-reduce."""

from __future__ import annotations

import sys

import nccl_doctor


def main() -> None:
    report = nccl_doctor.check(
        level="quick", select=["launch_record", "interfaces", "environment"], timeout=60
    )
    causes = [cause.code for cause in report.causes]
    sys.stdout.write(f"{report.verdict} {report.exit_code} {','.join(causes)}\n")
    sys.stdout.flush()
    if report.exit_code:
        return
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = torch.ones(1)
    dist.all_reduce(values)
    sys.stdout.write(f"{values.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
